#include "model/weight_packer.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "kernels/panels/panel.h"
#include "quant/node_tiles.h"
#include "quant/panel_matmul.h"
#include "switchyard/core/log.h"
#include "switchyard/core/macros.h"

namespace switchyard {
namespace {

// One matrix that moves.
struct Move {
  WeightMatrix from;
  std::vector<const std::byte**> pointers;  // that refer to it
  size_t at = 0;                            // in the memory of the panels
  size_t panel_bytes = 0;
  OwnedBytes* owned = nullptr;  // that it lies in, or null
};

// Panels of a matrix that one task packs. Their source goes when they are there, so that an output
// head of hundreds of megabytes is not there twice.
struct Piece {
  const Move* move = nullptr;
  size_t first = 0, count = 0;  // panels
};
constexpr size_t kPieceBytes = size_t{4} << 20;

// Bytes of a matrix on each of several nodes from which on big pages serve: about 1 MiB of a range
// then lies on the node of its neighbour.
constexpr size_t kMinBigPageRange = size_t{8} << 20;

class Packer {
 public:
  Packer(TransformerWeights& weights, ThreadPool& pool, const PackHooks& hooks)
      : pool_(pool), hooks_(hooks) {
    for (OwnedBytes& owned : weights.owned) owned_.emplace(owned.begin, &owned);
    for (LayerWeights& layer : weights.layers) AddLayer(layer);
    const bool is_tied = weights.head.data == weights.embedding.data;
    if (!is_tied) Add(weights.head);
  }

  // Whether there is room beside the copies that are to go.
  bool Fits(size_t available) const {
    size_t owned = 0;
    for (const auto& [begin, bytes] : owned_) owned += bytes->bytes;
    return available == 0 || bytes_ <= available + owned;
  }
  size_t bytes() const { return bytes_; }

  std::shared_ptr<const MappedMemory> Run() {
    if (moves_.empty()) return nullptr;
    auto memory = std::make_shared<MappedMemory>(bytes_, "weights in panels", Pages());
    std::vector<size_t> pieces_of_node;
    const std::vector<Piece> pieces = Pieces(pieces_of_node);
    for (const Piece& piece : pieces) {
      if (piece.move->owned != nullptr) ++waiting_[piece.move->owned];
    }
    // Memory is on the node of the worker that first writes it.
    pool_.RunOnNodes(
        pieces_of_node, [&](size_t i, size_t) { Pack(pieces[i], memory->data()); }, NodeHelp::kNo);
    // Rows of other matrices lie between those of these.
    for (const Move& move : moves_) {
      if (move.owned == nullptr && !IsDense(move.from))
        Tell(hooks_.release, move.from, 0, move.from.rows);
    }
    for (const Move& move : moves_) {
      for (const std::byte** pointer : move.pointers) *pointer = memory->data() + move.at;
    }
    for (const std::function<void()>& change : changes_) change();
    return memory;
  }

 private:
  static bool IsDense(const WeightMatrix& matrix) { return matrix.stride == matrix.cols; }

  void AddLayer(LayerWeights& layer) {
    AttentionWeights& attention = layer.attention;
    for (WeightMatrix* matrix :
         {&attention.q, &attention.k, &attention.v, &attention.o, &attention.q_a, &attention.kv_a,
          &layer.dense.gate, &layer.dense.up, &layer.dense.down})
      Add(*matrix);
    for (moe::ExpertBank* bank : {&layer.experts.w1, &layer.experts.w3, &layer.experts.w2})
      Add(*bank);
  }

  void Add(WeightMatrix& matrix) {
    const MatrixFormat format = quant::InPanels(matrix.format, matrix.cols);
    if (matrix.data == nullptr || !format.in_panels) return;
    AddMove(matrix, format, &matrix.data);
    changes_.push_back([&matrix, format] {
      matrix.format = format;
      matrix.stride = matrix.cols;
      matrix.scale_stride = 0;
      matrix.scale = matrix.zero = nullptr;
      matrix.tensor_scale = nullptr;
    });
  }

  void Add(moe::ExpertBank& bank) {
    const MatrixFormat format = quant::InPanels(bank.format, bank.cols);
    const bool is_there =
        std::ranges::all_of(bank.data, [](const std::byte* data) { return data != nullptr; });
    if (bank.data.empty() || !is_there || !format.in_panels) return;
    const ExpertMatrices view = bank.View();
    for (size_t e = 0; e < bank.data.size(); ++e) {
      WeightMatrix matrix;
      matrix.format = view.format;
      matrix.rows = view.rows;
      matrix.cols = view.cols;
      matrix.stride = view.stride;
      matrix.scale_stride = view.scale_stride;
      matrix.data = view.data[e];
      if (!view.scale.empty()) matrix.scale = view.scale[e];
      if (!view.zero.empty()) matrix.zero = view.zero[e];
      if (!view.tensor_scale.empty()) matrix.tensor_scale = view.tensor_scale[e];
      AddMove(matrix, format, &bank.data[e]);
    }
    changes_.push_back([&bank, format] {
      bank.format = format;
      bank.stride = bank.cols;
      bank.scale_stride = 0;
      bank.scale.clear();
      bank.zero.clear();
      bank.tensor_scale.clear();
    });
  }

  // Copies of an expert are packed once.
  void AddMove(const WeightMatrix& from, const MatrixFormat& format, const std::byte** pointer) {
    const auto [found, is_new] = by_data_.try_emplace(from.data, moves_.size());
    if (!is_new) {
      moves_[found->second].pointers.push_back(pointer);
      return;
    }
    const size_t panel_bytes = quant::PanelBytes(format, 1, from.cols);
    Move move{from, {pointer}, bytes_, panel_bytes, OwnerOf(from.data)};
    bytes_ += kernels::NumPanels(from.rows) * panel_bytes;
    moves_.push_back(std::move(move));
  }

  OwnedBytes* OwnerOf(const std::byte* data) const {
    auto after = owned_.upper_bound(data);
    if (after == owned_.begin()) return nullptr;
    OwnedBytes* owned = std::prev(after)->second;
    return data < owned->begin + owned->bytes ? owned : nullptr;
  }

  PageSize Pages() const {
    const size_t nodes = pool_.num_nodes();
    const bool are_big = nodes == 1 || bytes_ / (moves_.size() * nodes) >= kMinBigPageRange;
    return are_big ? PageSize::kBig : PageSize::kSmall;
  }

  // Those of node 0, of node 1, and so on; and how many each has.
  std::vector<Piece> Pieces(std::vector<size_t>& pieces_of_node) const {
    std::vector<Piece> pieces;
    for (size_t node = 0; node < pool_.num_nodes(); ++node) {
      const size_t before = pieces.size();
      for (const Move& move : moves_) {
        const size_t panels = kernels::NumPanels(move.from.rows);
        const size_t step = std::max<size_t>(1, kPieceBytes / move.panel_bytes);
        const size_t end = quant::FirstPanelOf(node + 1, panels, pool_.num_nodes());
        for (size_t p = quant::FirstPanelOf(node, panels, pool_.num_nodes()); p < end; p += step)
          pieces.push_back({&move, p, std::min(step, end - p)});
      }
      pieces_of_node.push_back(pieces.size() - before);
    }
    return pieces;
  }

  void Pack(const Piece& piece, std::byte* memory) {
    const Move& move = *piece.move;
    const ExpertMatrices matrix = move.from.AsBank();
    const auto rows_before = [&](size_t panel) {
      return std::min(panel * kernels::kPanelRows, move.from.rows);
    };
    for (size_t p = piece.first; p < piece.first + piece.count; ++p) {
      Tell(hooks_.prepare, move.from, rows_before(p), rows_before(p + 1));
      quant::PackPanel(matrix, 0, p, memory + move.at + p * move.panel_bytes);
    }
    if (move.owned != nullptr) {
      const std::lock_guard lock(mutex_);
      if (--waiting_[move.owned] == 0) move.owned->memory.reset();
    } else if (IsDense(move.from)) {
      Tell(hooks_.release, move.from, rows_before(piece.first),
           rows_before(piece.first + piece.count));
    }
  }

  static void Tell(const std::function<void(const std::byte*, size_t)>& hook,
                   const WeightMatrix& matrix, size_t first, size_t end) {
    const std::byte* begin = matrix.RowAt(first);
    const size_t last = BytesOf(matrix.dtype(), matrix.cols);
    hook(begin, static_cast<size_t>(matrix.RowAt(end - 1) - begin) + last);
  }

  ThreadPool& pool_;
  const PackHooks& hooks_;
  std::map<const std::byte*, OwnedBytes*> owned_;  // by their first byte
  std::vector<Move> moves_;
  std::map<const std::byte*, size_t> by_data_;
  std::map<const OwnedBytes*, size_t> waiting_;  // pieces that have not moved
  std::mutex mutex_;
  std::vector<std::function<void()>> changes_;  // when all has moved
  size_t bytes_ = 0;
};

}  // namespace

std::shared_ptr<const MappedMemory> PackWeights(TransformerWeights& weights, ThreadPool& pool,
                                                const PackHooks& hooks, size_t available) {
  Packer packer(weights, pool, hooks);
  if (!packer.Fits(available)) {
    Log(LogLevel::kWarning,
        fmt::format(
            "weights stay as they are stored, which is slower: repacked they take {} bytes, "
            "{} are available",
            packer.bytes(), available));
    return nullptr;
  }
  auto memory = packer.Run();
  std::erase_if(weights.owned, [](const OwnedBytes& owned) { return owned.memory == nullptr; });
  weights.owned_bytes = 0;
  for (const OwnedBytes& owned : weights.owned) weights.owned_bytes += owned.bytes;
  return memory;
}

}  // namespace switchyard
