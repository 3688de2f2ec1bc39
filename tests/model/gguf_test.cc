#include "switchyard/model/gguf.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <bit>
#include <cstring>

#include "testing/gguf.h"
#include "testing/goldens.h"
#include "testing/safetensors_builder.h"

namespace switchyard {
namespace {

using testing::AsBytes;
using testing::Cat;
using testing::ExactBytes;
using testing::ExpectError;
using testing::TempFolder;
namespace fs = std::filesystem;

constexpr auto kCorrupt = ErrorCode::kCorruptData;
constexpr auto kUnsupported = ErrorCode::kUnsupported;

// Bytes of a file, right or wrong, piece by piece.
class RawGguf {
 public:
  template <typename T>
  RawGguf& Add(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  RawGguf& Text(std::string_view text) {
    Add<uint64_t>(text.size());
    bytes_ += text;
    return *this;
  }
  RawGguf& Header(uint64_t tensors, uint64_t entries, uint32_t version = 3) {
    bytes_ = "GGUF";
    return Add(version).Add(tensors).Add(entries);
  }
  RawGguf& Key(std::string_view key, GgufType type) {
    return Text(key).Add(static_cast<uint32_t>(type));
  }
  // Sizes in the order of the file: the innermost first.
  RawGguf& Tensor(std::string_view name, std::vector<uint64_t> sizes, uint32_t type,
                  uint64_t offset) {
    Text(name).Add(static_cast<uint32_t>(sizes.size()));
    for (uint64_t size : sizes) Add(size);
    return Add(type).Add(offset);
  }
  RawGguf& Data(size_t bytes, size_t alignment = 32) {
    while (bytes_.size() % alignment != 0) bytes_ += '\0';
    bytes_ += std::string(bytes, 'd');
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

void Parse(const std::string& bytes) {
  const ExactBytes exact(bytes);
  GgufFile::Parse("m.gguf", exact.span());
}

void ExpectRefused(const RawGguf& raw, std::initializer_list<std::string_view> words,
                   ErrorCode code = kCorrupt) {
  const std::string message = ExpectError(code, words, [&] { Parse(raw.bytes()); });
  EXPECT_TRUE(message.starts_with("m.gguf: ")) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  EXPECT_LT(message.size(), 600u);
}

// A file with every type of value and three tensors, whose last byte is data.
std::string SmallFile() {
  GgufWriter writer;
  writer.SetText("general.architecture", "olmoe");
  writer.SetU32("olmoe.block_count", 2);
  writer.SetU64("big", uint64_t{1} << 40);
  writer.SetF32("olmoe.eps", 1e-5f);
  writer.SetFlag("yes", true);
  writer.SetTexts("tokens", std::vector<std::string>{"a", "", "\xff"});
  writer.SetI32s("types", std::vector<int32_t>{1, -2, 3});
  writer.SetF32s("scores", std::vector<float>{0.5f, -1.0f});
  writer.AddTensor("a", DType::kF32, Shape({3}));
  writer.AddTensor("b", DType::kGgmlQ80, Shape({2, 64}));
  writer.AddTensor("c", DType::kBF16, Shape({2, 2, 4, 2}));
  const GgufWriter::Layout layout = writer.Finish();
  std::string bytes = layout.header;
  const size_t sizes[] = {12, 136, 64};
  for (size_t i = 0; i < 3; ++i) {
    bytes.resize(layout.offsets[i], '\0');
    bytes += std::string(sizes[i], static_cast<char>('a' + i));
  }
  EXPECT_EQ(bytes.size(), layout.file_bytes);
  return bytes;
}

TEST(Gguf, ReadsWhatTheWriterWrites) {
  const std::string bytes = SmallFile();
  const ExactBytes exact(bytes);
  const GgufFile file = GgufFile::Parse("m.gguf", exact.span());
  EXPECT_EQ(file.version(), 3u);
  EXPECT_EQ(file.alignment(), 32u);
  ASSERT_EQ(file.entries().size(), 8u);
  EXPECT_EQ(file.Text("general.architecture"), "olmoe");
  EXPECT_EQ(file.Count("olmoe.block_count", 1, 10), 2u);
  EXPECT_EQ(file.Count("big", 1, SIZE_MAX), size_t{1} << 40);
  EXPECT_EQ(file.Number("olmoe.eps", 0, 1), static_cast<double>(1e-5f));
  EXPECT_EQ(file.Number("olmoe.block_count", 0, 10), 2.0);
  EXPECT_TRUE(file.Flag("yes"));
  EXPECT_EQ(file.Texts("tokens"), (std::vector<std::string_view>{"a", "", "\xff"}));
  EXPECT_EQ(file.Numbers("types", -10, 10), (std::vector<double>{1, -2, 3}));
  EXPECT_EQ(file.Numbers("scores", -10, 10), (std::vector<double>{0.5, -1}));
  EXPECT_EQ(file.Counts("olmoe.block_count", 0, 9), std::vector<size_t>{2});
  EXPECT_EQ(file.OptionalCount("absent", 0, 1), std::nullopt);
  EXPECT_EQ(file.OptionalFlag("absent"), std::nullopt);
  EXPECT_EQ(file.OptionalText("absent"), std::nullopt);
  EXPECT_EQ(file.OptionalNumber("absent", 0, 1), std::nullopt);
  EXPECT_EQ(file.FindEntry(""), nullptr);

  ASSERT_EQ(file.tensors().size(), 3u);
  const GgufTensorInfo* b = file.FindTensor("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype, DType::kGgmlQ80);
  EXPECT_EQ(b->shape, Shape({2, 64}));
  EXPECT_EQ(b->bytes, 136u);
  const TensorView view = file.View(*b);
  EXPECT_EQ(view.NumBytes(), 136u);
  EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(view.data), 136), std::string(136, 'b'));
  EXPECT_EQ(file.FindTensor("c")->shape, Shape({2, 2, 4, 2}));
  EXPECT_EQ(file.FindTensor("d"), nullptr);
  EXPECT_EQ(file.data_bytes(), 32u + 160u + 64u);
}

TEST(Gguf, ReadsVersionTwoAndOtherAlignments) {
  RawGguf raw;
  raw.Header(1, 1, 2).Key("general.alignment", GgufType::kU32).Add<uint32_t>(64);
  raw.Tensor("t", {4}, 24, 0).Data(4, 64);
  const ExactBytes exact(raw.bytes());
  const GgufFile file = GgufFile::Parse("m.gguf", exact.span());
  EXPECT_EQ(file.version(), 2u);
  EXPECT_EQ(file.alignment(), 64u);
  EXPECT_EQ(std::to_integer<char>(*file.View(file.tensors().at(0)).data), 'd');
}

TEST(Gguf, ReadsFilesWithoutTensors) {
  RawGguf raw;
  raw.Header(0, 1).Key("k", GgufType::kU8).Add<uint8_t>(7);
  const ExactBytes exact(raw.bytes());
  EXPECT_EQ(GgufFile::Parse("m.gguf", exact.span()).Count("k", 0, 255), 7u);
}

TEST(Gguf, ReadsEveryTypeOfValue) {
  RawGguf raw;
  raw.Header(0, 12);
  raw.Key("u8", GgufType::kU8).Add<uint8_t>(200).Key("i8", GgufType::kI8).Add<int8_t>(-8);
  raw.Key("u16", GgufType::kU16).Add<uint16_t>(60000);
  raw.Key("i16", GgufType::kI16).Add<int16_t>(-16);
  raw.Key("u32", GgufType::kU32).Add<uint32_t>(4000000000u);
  raw.Key("i32", GgufType::kI32).Add<int32_t>(-32);
  raw.Key("u64", GgufType::kU64).Add<uint64_t>(UINT64_MAX);
  raw.Key("i64", GgufType::kI64).Add<int64_t>(-64);
  raw.Key("f32", GgufType::kF32).Add(1.5f).Key("f64", GgufType::kF64).Add(2.5);
  raw.Key("bool", GgufType::kBool).Add<uint8_t>(0);
  raw.Key("bools", GgufType::kArray).Add<uint32_t>(7).Add<uint64_t>(2).Add<uint16_t>(0x0100);
  const ExactBytes exact(raw.bytes());
  const GgufFile file = GgufFile::Parse("m.gguf", exact.span());
  EXPECT_EQ(file.Count("u8", 0, 255), 200u);
  EXPECT_EQ(file.Count("u16", 0, 65535), 60000u);
  EXPECT_EQ(file.Count("u32", 0, SIZE_MAX), 4000000000u);
  EXPECT_EQ(file.Count("u64", 0, SIZE_MAX), SIZE_MAX);
  for (const auto& [key, value] : {std::pair("i8", -8.0), std::pair("i16", -16.0),
                                   std::pair("i32", -32.0), std::pair("i64", -64.0)}) {
    EXPECT_EQ(file.Number(key, -100, 0), value);
    ExpectError(kCorrupt, {"m.gguf", key, "a whole number of at least 0", "found", "-"},
                [&, name = std::string_view(key)] { file.Count(name, 0, SIZE_MAX); });
  }
  EXPECT_EQ(file.Number("f32", 0, 9), 1.5);
  EXPECT_EQ(file.Number("f64", 0, 9), 2.5);
  EXPECT_FALSE(file.Flag("bool"));
  EXPECT_EQ(file.Counts("bools", 0, 1), (std::vector<size_t>{0, 1}));
}

TEST(Gguf, WrongValuesAreRefusedByName) {
  const std::string bytes = SmallFile();
  const ExactBytes exact(bytes);
  const GgufFile file = GgufFile::Parse("m.gguf", exact.span());
  const auto refused = [&](std::initializer_list<std::string_view> words, const auto& body) {
    ExpectError(kCorrupt, {"m.gguf: metadata key "}, body);
    ExpectError(kCorrupt, words, body);
  };
  refused({"\"nope\": is missing"}, [&] { file.Count("nope", 0, 1); });
  refused({"\"nope\": is missing"}, [&] { file.Text("nope"); });
  refused({"\"yes\": expected a whole number from 0 to 1, found bool true"},
          [&] { file.Count("yes", 0, 1); });
  refused({"\"olmoe.block_count\": expected a whole number from 3 to 9, found u32 2"},
          [&] { file.Count("olmoe.block_count", 3, 9); });
  refused({"\"olmoe.block_count\": expected a bool, found u32 2"},
          [&] { file.OptionalFlag("olmoe.block_count"); });
  refused({"\"types\": expected a string, found an array of 3 i32"}, [&] { file.Text("types"); });
  refused({"\"types\": expected", "found -2 at index 1"}, [&] { file.Counts("types", 0, 9); });
  refused({"\"tokens\": expected", "array of 3 string"}, [&] { file.Counts("tokens", 0, 9); });
  refused({"\"tokens\": expected a number"}, [&] { file.Numbers("tokens", 0, 9); });
  refused({"\"types\": expected an array of strings"}, [&] { file.Texts("types"); });
  refused({"\"general.architecture\": expected a number", "string \"olmoe\""},
          [&] { file.Number("general.architecture", 0, 1); });
  refused({"\"olmoe.eps\": expected a whole number"}, [&] { file.Count("olmoe.eps", 0, 1); });
}

TEST(Gguf, EveryPrefixIsRefused) {
  const std::string bytes = SmallFile();
  for (size_t size = 0; size < bytes.size(); ++size) {
    SCOPED_TRACE(size);
    EXPECT_THROW(Parse(bytes.substr(0, size)), Error);
  }
}

TEST(Gguf, CutAndGrownFilesNameBytesAndTensor) {
  const std::string bytes = SmallFile();
  ExpectError(kCorrupt, {"m.gguf", "cut short", "(1 missing)", "first tensor affected is \"c\""},
              [&] { Parse(bytes.substr(0, bytes.size() - 1)); });
  ExpectError(kCorrupt, {"(65 missing)", "\"c\""},
              [&] { Parse(bytes.substr(0, bytes.size() - 65)); });
  ExpectError(kCorrupt, {"(200 missing)", "\"b\""},
              [&] { Parse(bytes.substr(0, bytes.size() - 200)); });
  ExpectError(kCorrupt, {"too long", "(1 extra)"}, [&] { Parse(bytes + "x"); });
  const std::string joined = Cat({bytes, bytes});
  ExpectError(kCorrupt, {"too long", "another GGUF file", "split"}, [&] { Parse(joined); });
}

TEST(Gguf, OtherFilesAreNamed) {
  ExpectError(kCorrupt, {"not a GGUF file", "\"PK"}, [] { Parse("PK\x03\x04 and more"); });
  ExpectError(kCorrupt, {"cut short"}, [] { Parse(""); });
  ExpectError(kCorrupt, {"cut short"}, [] { Parse("GGU"); });
  ExpectError(kCorrupt, {"Git LFS"}, [] { Parse("version https://git-lfs.github.com/spec/v1"); });
  ExpectError(kUnsupported, {"before August 2023"}, [] { Parse("tjggxxxxxxxx"); });
  ExpectRefused(RawGguf().Header(0, 0, 1), {"version 1", "2 and 3"}, kUnsupported);
  ExpectRefused(RawGguf().Header(0, 0, 4), {"version 4"}, kUnsupported);
  ExpectRefused(RawGguf().Header(0, 0, 0), {"version 0"}, kUnsupported);
  ExpectRefused(RawGguf().Header(0, 0, 0x03000000), {"big endian"}, kUnsupported);
}

TEST(Gguf, FaultyMetadataIsRefused) {
  const auto one = [] { return RawGguf().Header(0, 1); };
  const std::string key_too_long(65536, 'k');
  ExpectRefused(one().Key("", GgufType::kU8).Add<uint64_t>(0), {"key", "0 is empty"});
  ExpectRefused(one().Key(key_too_long, GgufType::kU8).Add<uint64_t>(0), {"65536 bytes", "65535"});
  ExpectRefused(one().Text("k").Add<uint32_t>(13).Add<uint64_t>(0), {"\"k\"", "value type 13"});
  ExpectRefused(one().Key("k", GgufType::kBool).Add<uint64_t>(2), {"\"k\"", "bool is 2"});
  ExpectRefused(one().Key("k", GgufType::kArray).Add<uint32_t>(13).Add<uint64_t>(0),
                {"\"k\"", "value type 13"});
  ExpectRefused(RawGguf()
                    .Header(0, 2)
                    .Key("k", GgufType::kU8)
                    .Add<uint8_t>(1)
                    .Key("k", GgufType::kU8)
                    .Add(uint8_t{1}),
                {"\"k\"", "twice"});
  RawGguf nested = one();
  nested.Key("k", GgufType::kArray);
  for (int i = 0; i < 10000; ++i) nested.Add<uint32_t>(9).Add<uint64_t>(1);
  ExpectRefused(nested, {"\"k\"", "array of arrays"}, kUnsupported);
  for (uint32_t alignment : {0u, 1u, 3u, 4u, 33u, 1u << 21, 1u << 30, 1u << 31}) {
    ExpectRefused(one().Key("general.alignment", GgufType::kU32).Add(alignment),
                  {"general.alignment", "power of two", std::to_string(alignment)});
  }
  ExpectRefused(one().Key("general.alignment", GgufType::kF32).Add(32.0f), {"general.alignment"});
}

// The resident memory of the process at its highest, in KiB.
size_t PeakKib() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<size_t>(usage.ru_maxrss);
}

TEST(Gguf, ClaimedSizesAllocateNothing) {
  const size_t before = PeakKib();
  for (uint64_t claimed : {uint64_t{1} << 30, uint64_t{1} << 62, UINT64_MAX, UINT64_MAX - 7}) {
    ExpectRefused(RawGguf().Header(0, 1).Add(claimed).Add<uint64_t>(0), {"key"});
    ExpectRefused(RawGguf().Header(0, 1).Key("k", GgufType::kString).Add(claimed), {"\"k\""});
    for (uint32_t type = 0; type < 13; ++type) {
      if (type == 9) continue;
      ExpectRefused(
          RawGguf().Header(0, 1).Key("k", GgufType::kArray).Add(type).Add(claimed).Add(claimed),
          {"\"k\""});
    }
    ExpectRefused(RawGguf().Header(claimed, 0), {"tensors", std::to_string(claimed)});
    ExpectRefused(RawGguf().Header(0, claimed), {"metadata entries", std::to_string(claimed)});
    ExpectRefused(RawGguf().Header(1, 0).Add(claimed).Data(64), {"name of tensor 0"});
  }
  EXPECT_LT(PeakKib() - before, 32u * 1024);
}

TEST(Gguf, FaultyTensorsAreRefused) {
  const auto file = [](std::vector<uint64_t> sizes, uint32_t type, uint64_t offset = 0,
                       std::string_view name = "blk.0.t") {
    return RawGguf().Header(1, 0).Tensor(name, std::move(sizes), type, offset).Data(4096);
  };
  const std::string t = "tensor \"blk.0.t\"";
  // Numbers of axes; a file that claims 2^31 of them has no room for their sizes.
  ExpectRefused(file({}, 0), {t, "0 axes"});
  ExpectRefused(file({1, 1, 1, 1, 1}, 0), {t, "5 axes"});
  for (uint32_t rank : {9u, 1u << 31})
    ExpectRefused(RawGguf().Header(1, 0).Text("blk.0.t").Add(rank).Data(64),
                  {t, std::to_string(rank)});
  for (size_t axis = 0; axis < 4; ++axis) {
    std::vector<uint64_t> sizes(4, 2);
    sizes[axis] = 0;
    ExpectRefused(file(sizes, 0), {t, "size 0", "axis " + std::to_string(axis)});
  }
  ExpectRefused(file({(uint64_t{1} << 42) + 1, 1152}, 0), {"m.gguf", "blk.0.t"});
  ExpectRefused(file({uint64_t{1} << 63, 2}, 0), {t, "overflows"});
  ExpectRefused(file({UINT64_MAX, 2}, 0), {t, "overflows"});
  ExpectRefused(file({uint64_t{1} << 32, uint64_t{1} << 32, uint64_t{1} << 32, 1}, 0),
                {t, "overflows"});
  ExpectRefused(file({8}, 0, UINT64_MAX - 31), {t, "overflows"});
  // Rows that are no whole blocks.
  ExpectRefused(file({896, 2}, 12), {t, "896", "Q4_K", "blocks of 256"});
  ExpectRefused(file({33}, 2), {t, "33", "Q4_0", "blocks of 32"});
  ExpectRefused(file({2880}, 14), {t, "2880", "Q6_K"});
  // Types.
  ExpectRefused(file({32}, 4), {t, "type 4 (Q4_2)", "removed"}, kUnsupported);
  ExpectRefused(file({32}, 5), {t, "type 5 (Q4_3)", "removed"}, kUnsupported);
  for (uint32_t type : {31u, 32u, 33u, 36u, 37u, 38u})
    ExpectRefused(file({32}, type), {t, "type " + std::to_string(type), "removed"}, kUnsupported);
  for (uint32_t type : {9u, 15u, 40u, 41u})
    ExpectRefused(file({256}, type), {t, "type " + std::to_string(type)}, kUnsupported);
  ExpectRefused(file({32}, 42), {t, "unknown type 42"}, kUnsupported);
  ExpectRefused(file({32}, UINT32_MAX), {t, "unknown type"}, kUnsupported);
  // Offsets.
  ExpectRefused(file({32}, 0, 16), {t, "offset 16", "alignment 32"});
  ExpectRefused(file({32}, 0, 32), {t, "gap"});
  ExpectRefused(file({32}, 0, uint64_t{1} << 40), {t, "gap"});
  const auto two = [](std::string_view second, uint64_t offset) {
    RawGguf raw;
    raw.Header(2, 0).Tensor("blk.0.t", {16}, 0, 0).Tensor(second, {16}, 0, offset).Data(128);
    return raw;
  };
  ExpectRefused(two("u", 32), {"tensor \"u\"", "overlap", "\"blk.0.t\""});
  ExpectRefused(two("u", 0), {"overlap"});
  ExpectRefused(two("u", 96), {"tensor \"u\"", "gap"});
  ExpectRefused(two("blk.0.t", 64), {t, "twice"});
  // Names.
  ExpectRefused(file({32}, 0, 0, ""), {"tensor 0", "empty"});
  ExpectRefused(file({32}, 0, 0, std::string(65, 'n')), {"tensor 0", "65 bytes"});
  // The data is not there.
  ExpectRefused(file({2048}, 0), {"cut short", "4096 missing", "\"blk.0.t\""});
}

TEST(Gguf, AnUnalignedAddressIsTheCallersFault) {
  const ExactBytes exact(SmallFile(), 4);
  ExpectError(ErrorCode::kInvalidArgument, {"m.gguf", "multiple of 8"},
              [&] { GgufFile::Parse("m.gguf", exact.span()); });
}

TEST(Gguf, ManyStringsAreQuick) {
  std::vector<std::string> tokens(256'000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = std::to_string(i);
  GgufWriter writer;
  writer.SetTexts("tokenizer.ggml.tokens", tokens);
  const ExactBytes exact(writer.Finish().header);
  const GgufFile file = GgufFile::Parse("m.gguf", exact.span());
  EXPECT_EQ(file.FindEntry("tokenizer.ggml.tokens")->count, 256'000u);
  const auto texts = file.Texts("tokenizer.ggml.tokens");
  EXPECT_EQ(texts.size(), tokens.size());
  EXPECT_EQ(texts.back(), "255999");
}

TEST(GgufWriter, RefusesWhatFilesCannotHold) {
  GgufWriter writer;
  writer.SetU32("k", 1);
  const auto refused = [](std::initializer_list<std::string_view> words, const auto& body) {
    ExpectError(ErrorCode::kInvalidArgument, words, body);
  };
  refused({"\"k\"", "already"}, [&] { writer.SetFlag("k", true); });
  refused({"empty"}, [&] { writer.SetFlag("", true); });
  writer.AddTensor("t", DType::kF32, Shape({1}));
  refused({"\"t\"", "already"}, [&] { writer.AddTensor("t", DType::kF32, Shape({1})); });
  refused({"\"u\"", "F8_E4M3"}, [&] { writer.AddTensor("u", DType::kF8E4M3, Shape({1})); });
  refused({"\"u\"", "[0, 4]"}, [&] { writer.AddTensor("u", DType::kF32, Shape({0, 4})); });
  refused({"\"u\"", "[]"}, [&] { writer.AddTensor("u", DType::kF32, Shape{}); });
  refused({"\"u\"", "Q4_K", "[2, 128]"}, [&] {
    writer.AddTensor("u", DType::kGgmlQ4K, Shape({2, 128}));
  });
  refused({"names"}, [&] { writer.AddTensor("", DType::kF32, Shape({1})); });
}

TEST(GgufWriter, CopiesEntries) {
  const std::string bytes = SmallFile();
  const ExactBytes exact(bytes);
  const GgufFile file = GgufFile::Parse("m.gguf", exact.span());
  GgufWriter writer;
  for (const GgufEntry& entry : file.entries()) writer.Copy(entry);
  const ExactBytes copied(writer.Finish().header);
  const GgufFile copy = GgufFile::Parse("copy.gguf", copied.span());
  ASSERT_EQ(copy.entries().size(), file.entries().size());
  for (size_t i = 0; i < file.entries().size(); ++i) {
    EXPECT_EQ(copy.entries()[i].key, file.entries()[i].key);
    EXPECT_TRUE(std::ranges::equal(copy.entries()[i].bytes, file.entries()[i].bytes));
  }
}

// Four parts, one tensor each; the names of files are those that are given.
struct Part {
  std::string name;
  uint32_t number;  // from 0
  uint32_t count = 4;
  uint32_t tensors = 4;
  std::string tensor = "t" + std::to_string(number);
  std::string architecture = number == 0 ? "olmoe" : "";
};

void Write(const TempFolder& folder, const Part& part) {
  GgufWriter writer;
  writer.SetU32("split.no", part.number);
  writer.SetU32("split.count", part.count);
  writer.SetU32("split.tensors.count", part.tensors);
  if (!part.architecture.empty()) writer.SetText("general.architecture", part.architecture);
  writer.AddTensor(part.tensor, DType::kF32, Shape({8}));
  const GgufWriter::Layout layout = writer.Finish();
  folder.Write(part.name, layout.header + std::string(32, static_cast<char>('0' + part.number)));
}

std::string NameOf(uint32_t number) {
  return Cat({"m-0000", std::to_string(number + 1), "-of-00004.gguf"});
}

void WriteAll(const TempFolder& folder) {
  for (uint32_t i = 0; i < 4; ++i) Write(folder, {.name = NameOf(i), .number = i});
}

TEST(GgufModel, OpensAllPartsByAnyOfThem) {
  const TempFolder folder;
  WriteAll(folder);
  folder.Write("unrelated.txt", "");
  for (const fs::path& path : {folder / NameOf(0), folder / NameOf(2), folder.path()}) {
    SCOPED_TRACE(path);
    const GgufModel model = testing::OpenGguf(path);
    EXPECT_EQ(model.metadata().Text("general.architecture"), "olmoe");
    EXPECT_EQ(model.parts().size(), 4u);
    ASSERT_EQ(model.tensors().size(), 4u);
    const GgufModel::Tensor* tensor = model.Find("t2");
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(std::to_integer<char>(*tensor->View().data), '2');
    EXPECT_TRUE(tensor->file->file_name().ends_with(NameOf(2)));
    EXPECT_EQ(model.Find("t4"), nullptr);
  }
}

TEST(GgufModel, FaultyPartsAreNamed) {
  const auto refused = [](ErrorCode code, std::initializer_list<std::string_view> words,
                          const auto& change, const std::string& open = NameOf(0)) {
    const TempFolder folder;
    WriteAll(folder);
    change(folder);
    const std::string message = ExpectError(code, words, [&] { testing::OpenGguf(folder / open); });
    EXPECT_EQ(message.find('\n'), std::string::npos);
  };
  refused(ErrorCode::kNotFound, {NameOf(1), "part 2 of 4", "missing"},
          [](const TempFolder& folder) { fs::remove(folder / NameOf(1)); });
  refused(kCorrupt, {NameOf(1), "header says part 4 of 4", "name says part 2"},
          [](const TempFolder& folder) { Write(folder, {.name = NameOf(1), .number = 3}); });
  refused(kCorrupt, {NameOf(1), "header says 3 parts", "name says 4"},
          [](const TempFolder& folder) {
            Write(folder, {NameOf(1), 1, 3});
          });
  refused(kCorrupt, {NameOf(2), "split.tensors.count", "differs", NameOf(0)},
          [](const TempFolder& folder) {
            Write(folder, {NameOf(2), 2, 4, 5});
          });
  refused(kCorrupt, {NameOf(2), "general.architecture", "differs", NameOf(0)},
          [](const TempFolder& folder) {
            Write(folder, {NameOf(2), 2, 4, 4, "t2", "llama"});
          });
  refused(kCorrupt, {NameOf(2), "\"t1\"", NameOf(1)}, [](const TempFolder& folder) {
    Write(folder, {NameOf(2), 2, 4, 4, "t1"});
  });
  refused(kCorrupt, {NameOf(0), "5 tensors", "found 4"}, [](const TempFolder& folder) {
    for (uint32_t i = 0; i < 4; ++i) Write(folder, {NameOf(i), i, 4, 5});
  });
  refused(kCorrupt, {NameOf(3), "(1 missing)", "\"t3\""}, [](const TempFolder& folder) {
    const std::string bytes = folder.Read(NameOf(3));
    folder.Write(NameOf(3), bytes.substr(0, bytes.size() - 1));
  });
  refused(
      kCorrupt, {"other.gguf", "4 parts", "-00001-of-00004.gguf"},
      [](const TempFolder& folder) { fs::rename(folder / NameOf(1), folder / "other.gguf"); },
      "other.gguf");
  refused(
      kCorrupt, {"joined.gguf", "another GGUF file"},
      [](const TempFolder& folder) {
        std::string all;
        for (uint32_t i = 0; i < 4; ++i) all += folder.Read(NameOf(i));
        folder.Write("joined.gguf", all);
      },
      "joined.gguf");
  refused(kCorrupt, {NameOf(0), "no metadata key", "split.count"},
          [](const TempFolder& folder) { folder.Write(NameOf(0), SmallFile()); });
}

TEST(GgufModel, FoldersAndPaths) {
  const TempFolder folder;
  ExpectError(ErrorCode::kNotFound, {"no .gguf file"}, [&] { testing::OpenGguf(folder.path()); });
  ExpectError(ErrorCode::kNotFound, {"m.gguf"}, [&] { testing::OpenGguf(folder / "m.gguf"); });
  folder.Write("m.gguf", SmallFile());
  EXPECT_EQ(testing::OpenGguf(folder.path()).tensors().size(), 3u);
  folder.Write("n.gguf", SmallFile());
  ExpectError(ErrorCode::kInvalidArgument, {"more than one", "m.gguf", "n.gguf"},
              [&] { testing::OpenGguf(folder.path()); });
}

TEST(Gguf, ReadsTheGoldens) {
  SY_SKIP_WITHOUT_GOLDENS();
  size_t num_read = 0;
  for (const auto& golden : fs::directory_iterator(*testing::GoldenDir() / "gguf")) {
    if (!golden.is_directory()) continue;
    const GgufModel model = testing::OpenGguf(golden.path());
    EXPECT_NE(model.Find("token_embd.weight"), nullptr) << golden.path();
    EXPECT_FALSE(model.metadata().Texts("tokenizer.ggml.tokens").empty());
    ++num_read;
  }
  EXPECT_GE(num_read, 20u);
}

}  // namespace
}  // namespace switchyard
