// A token travels once to each rank of other nodes that has one of its experts, and each of these
// ranks answers it.
#include <cstring>

#include "moe/ep/net_exchange.h"
#include "quant/act_quant.h"

namespace switchyard::moe {
namespace {

class FlatExchange final : public NetExchange {
 public:
  FlatExchange(Exchange& exchange, ProcessGroup& net)
      : exchange_(exchange),
        out_(net, exchange.options.wire.row_bytes()),
        home_(net, exchange.options.home.bytes()) {}

  void StartDispatch(ExecContext& context, const PackedTokens& packed, const TopKOutput&) override {
    ForEachFarRank([&](size_t rank) { out_.send_rows()[rank] = exchange_.targets[rank].size(); });
    out_.ExchangeCounts(exchange_.Limit("dispatch"));
    std::byte* to = out_.SendRoom();
    ForEachFarRank([&](size_t rank) {
      const std::vector<uint32_t>& tokens = exchange_.targets[rank];
      quant::ForEachRow(context, tokens.size(), [&](size_t i) {
        std::memcpy(to + i * packed.row_bytes, packed.Row(tokens[i]), packed.row_bytes);
      });
      to += tokens.size() * packed.row_bytes;
    });
    exchange_.stats.rows_between_nodes += out_.NumSent();
    out_.Start();
  }

  void FinishDispatch(ExecContext&, RowsOfSources& rows) override {
    out_.Wait(exchange_, "dispatch");
    size_t next = 0;
    ForEachFarRank([&](size_t source) {
      for (size_t i = 0; i < out_.recv_rows()[source]; ++i)
        rows[source].push_back(out_.Row(next++));
    });
  }

  // For each source, its rows by token and slot: the order in which the source expects them.
  void StartCombine(ExecContext& context, const ComputedResults& results,
                    const RowPacker& packer) override {
    const size_t top_k = exchange_.options.wire.top_k();
    const ReceivedTokens& received = *results.received;
    ForEachFarRank([&](size_t rank) { home_.send_rows()[rank] = 0; });
    sent_.clear();
    for (size_t i = 0; i < received.size(); ++i) {
      if (exchange_.nodes.IsHere(received.source[i])) continue;
      for (int32_t row : results.row_of.subspan(i * top_k, top_k)) {
        if (row < 0) continue;
        sent_.push_back(static_cast<uint32_t>(row));
        ++home_.send_rows()[received.source[i]];
      }
    }
    std::byte* to = home_.SendRoom();
    quant::ForEachRow(context, sent_.size(), [&](size_t i) {
      packer.Pack(sent_[i], to + i * exchange_.options.home.bytes());
    });
    ForEachFarRank(
        [&](size_t rank) { home_.recv_rows()[rank] = exchange_.result_slots[rank].size(); });
    exchange_.stats.results_between_nodes += home_.NumSent();
    home_.Start();
  }

  void CollectResults(std::span<const std::byte*> rows) override {
    home_.Wait(exchange_, "combine");
    size_t next = 0;
    ForEachFarRank([&](size_t rank) {
      for (uint32_t slot : exchange_.result_slots[rank]) rows[slot] = home_.Row(next++);
    });
  }

  void Drop() noexcept override {
    out_.Drop();
    home_.Drop();
  }

 private:
  template <typename Body>
  void ForEachFarRank(const Body& body) const {
    for (size_t rank = 0; rank < exchange_.group.size(); ++rank) {
      if (!exchange_.nodes.IsHere(rank)) body(rank);
    }
  }

  Exchange& exchange_;
  NetLeg out_, home_;
  std::vector<uint32_t> sent_;  // rows of results
};

}  // namespace

std::unique_ptr<NetExchange> MakeFlatExchange(Exchange& exchange, ProcessGroup& net) {
  return std::make_unique<FlatExchange>(exchange, net);
}

}  // namespace switchyard::moe
