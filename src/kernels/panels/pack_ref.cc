// What a panel holds, read one number at a time by the definition in panel.h.
#include <cstring>

#include "kernels/ggml/grids.h"
#include "kernels/panels/grid.h"
#include "kernels/panels/pack.h"
#include "kernels/panels/values.h"
#include "switchyard/core/small_floats.h"

namespace switchyard::kernels {
namespace {

// One element of a panel.
class PanelNumber {
 public:
  PanelNumber(const PanelFormat& format, const PanelLayout& layout, const std::byte* panel,
              size_t row, size_t col)
      : format_(format), layout_(layout), panel_(panel), row_(row), col_(col) {
    unit_ = panel + layout.UnitAt(col / kUnitCols);
    if (format.group != 0) group_ = col / format.group;
  }

  // What the code stands for; exact.
  float Value() const {
    switch (format_.codes) {
      case PanelCodes::kBF16: return ToFloat(BF16{HalfOfUnit()});
      case PanelCodes::kF16: return ToFloat(F16{HalfOfUnit()});
      case PanelCodes::kF32: return Read<float>(unit_ + col_ % kUnitCols * kWordBytes, row_);
      case PanelCodes::kE4M3: return DecodeE4M3(static_cast<uint8_t>(Code()));
      default: break;
    }
    if (IsGrid(format_.codes)) return static_cast<float>(OfCodebook());
    const uint32_t code = Code();
    switch (format_.values) {
      case PanelValues::kLinear:
        return static_cast<float>(static_cast<int>(code) - static_cast<int>(format_.bias));
      case PanelValues::kIq4Nl: return static_cast<float>(ggml::kIq4Values[code]);
      case PanelValues::kE2M1: return 0.5f * static_cast<float>(ggml::kE2M1Doubled[code]);
    }
    return 0.0f;
  }

  float Scale() const {
    const PanelField& at = layout_.scales;
    switch (format_.scales) {
      case PanelScales::kNone: return 1.0f;
      case PanelScales::kRow: return Read<float>(panel_, row_);
      case PanelScales::kGrid: return Read<float>(panel_, col_ / format_.group);
      case PanelScales::kF16: return ToFloat(InField<F16>(at));
      case PanelScales::kBF16: return ToFloat(InField<BF16>(at));
      case PanelScales::kF32: return InField<float>(at);
      case PanelScales::kE8M0: return DecodeE8M0(InField<uint8_t>(at));
      case PanelScales::kE4M3: return DecodeE4M3(InField<uint8_t>(at)) * Read<float>(panel_, 0);
      case PanelScales::kSuperU8: return OfSuper(layout_.d) * InField<uint8_t>(at);
      case PanelScales::kSuperI8: return OfSuper(layout_.d) * InField<int8_t>(at);
      case PanelScales::kSuperU4:
        return OfSuper(layout_.d) * static_cast<float>(InField<uint8_t>(at) & 15);
      case PanelScales::kSuperOdd: {
        const auto pair = InField<uint8_t>(at, group_ / 2);
        const int nibble = (pair >> (group_ % 2 * 4)) & 15;
        return OfSuper(layout_.d) * static_cast<float>(2 * nibble + 1) * TableFactor(format_);
      }
    }
    return 1.0f;
  }

  float Zero() const {
    if (format_.offsets != PanelOffsets::kZero) return 0.0f;
    return static_cast<float>(InField<uint8_t>(layout_.offsets));
  }

  // The offset of ggml's formats.
  bool has_added() const {
    return format_.offsets == PanelOffsets::kF16 || format_.offsets == PanelOffsets::kSuperMin;
  }
  float Added() const {
    if (format_.offsets == PanelOffsets::kF16) return ToFloat(InField<F16>(layout_.offsets));
    const uint8_t byte = InField<uint8_t>(layout_.offsets);
    const int min = format_.scales == PanelScales::kSuperU4 ? byte >> 4 : byte;
    return -(OfSuper(layout_.dmin) * static_cast<float>(min));
  }

  // With the operations, and their order, of DecodeRow.
  float Decoded() const {
    if (format_.scales == PanelScales::kNone) return Value();
    if (has_added()) return Value() * Scale() + Added();
    return (Value() - Zero()) * Scale();
  }

 private:
  template <class T>
  static T Read(const std::byte* from, size_t i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  T InField(const PanelField& field, size_t number) const {
    return Read<T>(panel_ + layout_.NumberAt(field, number, sizeof(T)), row_);
  }
  template <class T>
  T InField(const PanelField& field) const {
    return InField<T>(field, group_);
  }
  // A number of the row for the whole super-block.
  float OfSuper(const PanelField& field) const {
    return ToFloat(InField<F16>(field, col_ / kSuperCols));
  }

  uint32_t ByteOfWord(size_t word, size_t byte) const {
    return Read<uint8_t>(unit_ + word * kWordBytes, row_ * 4 + byte);
  }
  uint32_t Code() const {
    const size_t c = col_ % kUnitCols;
    const size_t b = c % 4;
    const auto bits = [](uint32_t byte, size_t from, uint32_t count) {
      return (byte >> from) & ((1u << count) - 1);
    };
    const auto nibble = [&] { return bits(ByteOfWord(c % 16 / 4, b), c / 16 * 4, 4); };
    const auto pair = [&](size_t word) {
      return bits(ByteOfWord(word + c / 16, b), c % 16 / 4 * 2, 2);
    };
    const auto bit = [&](size_t word) { return bits(ByteOfWord(word, b), c / 4, 1); };
    switch (format_.codes) {
      case PanelCodes::kBits2: return pair(0);
      case PanelCodes::kBits3: return pair(0) | bit(2) << 2;
      case PanelCodes::kBits4: return nibble();
      case PanelCodes::kBits5: return nibble() | bit(4) << 4;
      case PanelCodes::kBits6: return nibble() | pair(4) << 4;
      case PanelCodes::kBytes:
      case PanelCodes::kE4M3: return ByteOfWord(c / 4, b);
      case PanelCodes::kTernary: return TernaryDigit();
      default: break;
    }
    return 0;
  }

  const std::byte* SuperBlock() const {
    return panel_ + layout_.UnitAt(col_ / kSuperCols * kSuperUnits);
  }
  uint32_t TernaryDigit() const {
    const size_t line = col_ % kSuperCols / 4;
    for (size_t word = 0; word < kTernaryWords; ++word) {
      uint32_t rest = Read<uint8_t>(SuperBlock() + word * kWordBytes, row_ * 4 + col_ % 4);
      for (size_t digit = 0; digit < TernaryDigits(word); ++digit) {
        if (TernaryLine(word, digit) == line) return rest * 3 >> 8;
        rest = rest * 3 & 255;
      }
    }
    return 0;
  }

  // The high bits of a unit.
  uint32_t HighBits(const GridLayout& grid, size_t unit) const {
    const std::byte* highs = SuperBlock() + grid.highs_at();
    switch (grid.high_bits) {
      case 4: return Read<uint8_t>(highs, unit / 2 * kPanelRows + row_) >> (unit % 2 * 4) & 15;
      case 8: return Read<uint8_t>(highs, unit * kPanelRows + row_);
      case 16: return Read<uint16_t>(highs, unit * kPanelRows + row_);
      default: return 0;
    }
  }
  int OfCodebook() const {
    const GridLayout grid = GridOf(format_.codes);
    const size_t unit = col_ % kSuperCols / kUnitCols;
    const size_t c = col_ % kUnitCols;
    const size_t width = kUnitCols / grid.entries();
    const size_t entry = c / width;
    const size_t bits = grid.high_bits / grid.entries();
    const std::byte* indices = SuperBlock() + unit * grid.index_words * kWordBytes;
    const std::byte* word = indices + entry / 4 * kWordBytes;
    const uint32_t high = HighBits(grid, unit) >> (bits * entry) & ((1u << bits) - 1);
    const uint32_t low = Read<uint8_t>(word, row_ * 4 + entry % 4);
    const auto value = [&](const auto& book, uint32_t index) {
      return int{book[index * width + c % width]};
    };
    if (format_.codes == PanelCodes::kIq1)
      return 8 * value(ggml::kIq1Grid, low | (high & 7) << 8) + (high < 8 ? 1 : -1);
    const uint32_t index = low | high << 8;
    const uint8_t signs =
        Read<uint8_t>(SuperBlock() + grid.signs_at() + unit * kWordBytes, row_ * 4 + c / 8);
    const int sign = (signs >> (c % 8) & 1) == 0 ? 1 : -1;
    switch (format_.codes) {
      case PanelCodes::kIq2Xxs: return sign * value(ggml::kIq2XxsGrid, index);
      case PanelCodes::kIq2Xs: return sign * value(ggml::kIq2XsGrid, index);
      case PanelCodes::kIq2S: return sign * value(ggml::kIq2SGrid, index);
      case PanelCodes::kIq3Xxs: return sign * value(ggml::kIq3XxsGrid, index);
      default: return sign * value(ggml::kIq3SGrid, index);
    }
  }
  uint16_t HalfOfUnit() const {
    const size_t c = col_ % kUnitCols;
    const std::byte* word = unit_ + (c / 4 * 2 + c % 2) * kWordBytes;
    return Read<uint16_t>(word, row_ * 2 + c % 4 / 2);
  }

  const PanelFormat& format_;
  const PanelLayout& layout_;
  const std::byte* panel_;
  size_t row_;
  size_t col_;
  const std::byte* unit_;
  size_t group_ = 0;
};

}  // namespace

void DecodePanelRow(const PanelFormat& format, const PanelLayout& layout, const std::byte* panel,
                    size_t row, size_t n, float* out) noexcept {
  for (size_t k = 0; k < n; ++k) out[k] = PanelNumber(format, layout, panel, row, k).Decoded();
}

double PanelElement(const PanelFormat& format, const PanelLayout& layout, const std::byte* panel,
                    size_t row, size_t col) {
  const PanelNumber number(format, layout, panel, row, col);
  const bool is_super = IsSuper(format.scales);
  if (is_super || number.has_added()) return double{number.Decoded()};
  return (double{number.Value()} - double{number.Zero()}) * double{number.Scale()};
}

}  // namespace switchyard::kernels
