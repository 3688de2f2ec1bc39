#include "switchyard/model/safetensors.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <array>
#include <cstring>
#include <thread>

#include "switchyard/core/error.h"
#include "testing/goldens.h"
#include "testing/random.h"
#include "testing/safetensors_builder.h"

namespace switchyard {
namespace {

using testing::AsBytes;
using testing::Cat;
using testing::ExactBytes;
using testing::ExpectError;
using testing::SafetensorsBuilder;
using testing::SafetensorsBytes;
using testing::TempFolder;
namespace fs = std::filesystem;

constexpr auto kCorrupt = ErrorCode::kCorruptData;

std::string_view Data(const TensorView& view) {
  return {reinterpret_cast<const char*>(view.data), view.NumBytes()};
}

// Parses a copy that ends where the file ends, as m.safetensors.
void Parse(const std::string& bytes) {
  const ExactBytes exact(bytes);
  SafetensorsFile::Parse("m.safetensors", exact.span());
}

// The header as it is, with `data_bytes` zero bytes of data, must be refused with all of `words`.
void ExpectRefused(std::string_view header, size_t data_bytes,
                   std::initializer_list<std::string_view> words, ErrorCode code = kCorrupt) {
  SCOPED_TRACE(header);
  ExpectError(code, {"m.safetensors"},
              [&] { Parse(SafetensorsBytes(header, std::string(data_bytes, '\0'))); });
  ExpectError(code, words, [&] { Parse(SafetensorsBytes(header, std::string(data_bytes, '\0'))); });
}

std::string SmallFile() {
  return SafetensorsBuilder()
      .Add("weight", "F32", "[2,2]", std::string(16, 'w'))
      .Add("bias", "BF16", "[3]", "bbbbbb")
      .Add("ids", "U8", "[1,1]", "i")
      .Bytes();
}

TEST(Safetensors, ReadsTensors) {
  const std::string bytes = SmallFile();
  const SafetensorsFile file = SafetensorsFile::Parse("m.safetensors", AsBytes(bytes));
  EXPECT_EQ(file.file_name(), "m.safetensors");
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.data_bytes(), 23u);
  EXPECT_EQ(file.tensors()[0].name, "weight");
  EXPECT_EQ(file.tensors()[1].name, "bias");
  EXPECT_EQ(file.tensors()[1].begin, 16u);
  EXPECT_EQ(file.tensors()[1].end, 22u);

  const TensorInfo* bias = file.Find("bias");
  ASSERT_NE(bias, nullptr);
  EXPECT_EQ(bias->dtype, DType::kBF16);
  EXPECT_EQ(bias->shape, Shape({3}));
  const TensorView view = file.View(*bias);
  EXPECT_EQ(view.dtype, DType::kBF16);
  EXPECT_EQ(view.shape, Shape({3}));
  EXPECT_EQ(Data(view), "bbbbbb");
  EXPECT_EQ(Data(file.View(*file.Find("ids"))), "i");
  EXPECT_EQ(file.Find("absent"), nullptr);
  EXPECT_EQ(file.Find(""), nullptr);
  EXPECT_TRUE(file.metadata().empty());
}

TEST(Safetensors, ReadsEveryDTypeOfCore) {
  for (DType dtype :
       {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI64, DType::kI32, DType::kI16,
        DType::kI8, DType::kU8, DType::kBool, DType::kF8E4M3, DType::kF8E5M2, DType::kF8E8M0}) {
    const std::string bytes =
        SafetensorsBuilder()
            .Add("t", DTypeName(dtype), "[2]", std::string(2 * DTypeBytes(dtype), 'x'))
            .Bytes();
    const SafetensorsFile file = SafetensorsFile::Parse("m.safetensors", AsBytes(bytes));
    EXPECT_EQ(file.tensors().at(0).dtype, dtype);
  }
}

TEST(Safetensors, ReadsMetadataAndAnyOrderOfHeader) {
  const std::string bytes =
      SafetensorsBytes(R"({"b":{"shape":[1],"data_offsets":[2,3],"dtype":"I8"},)"
                       R"("__metadata__":{"format":"pt","":"x"},)"
                       R"("a":{"dtype":"F16","data_offsets":[0,2],"shape":[]}}   )",
                       "AAB");
  const SafetensorsFile file = SafetensorsFile::Parse("m.safetensors", AsBytes(bytes));
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"", "x"}}));
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.tensors()[0].name, "a");
  EXPECT_EQ(file.tensors()[0].shape.rank(), 0u);
  EXPECT_EQ(Data(file.View(file.tensors()[0])), "AA");
  EXPECT_EQ(Data(file.View(file.tensors()[1])), "B");
}

TEST(Safetensors, ReadsFilesWithoutTensorsAndTensorsWithoutElements) {
  EXPECT_TRUE(SafetensorsFile::Parse("m", AsBytes(SafetensorsBytes("{}", ""))).tensors().empty());
  const std::string bytes = SafetensorsBuilder()
                                .Add("none", "F32", "[0,5]", "")
                                .Add("x", "F32", "[1]", "xxxx")
                                .Add("end", "F32", "[3,0]", "")
                                .Bytes();
  const ExactBytes exact(bytes);
  const SafetensorsFile file = SafetensorsFile::Parse("m", exact.span());
  for (const TensorInfo& info : file.tensors()) EXPECT_NE(file.View(info).data, nullptr);
  EXPECT_EQ(file.View(*file.Find("end")).NumElements(), 0u);
  EXPECT_EQ(Data(file.View(*file.Find("x"))), "xxxx");
}

TEST(Safetensors, RankUpToTheLimitOfShape) {
  const std::string bytes = SafetensorsBuilder().Add("t", "U8", "[1,1,1,1,1,2]", "xy").Bytes();
  EXPECT_EQ(SafetensorsFile::Parse("m", AsBytes(bytes)).tensors().at(0).shape,
            Shape({1, 1, 1, 1, 1, 2}));
  ExpectRefused(R"({"t":{"dtype":"U8","shape":[1,1,1,1,1,1,2],"data_offsets":[0,2]}})", 2,
                {"\"t\"", "more than 6 axes"}, ErrorCode::kUnsupported);
}

TEST(Safetensors, MovesWithItsViews) {
  const std::string bytes = SmallFile();
  SafetensorsFile first = SafetensorsFile::Parse("m", AsBytes(bytes));
  const TensorInfo* info = first.Find("weight");
  const SafetensorsFile second = std::move(first);
  EXPECT_EQ(second.Find("weight"), info);
  EXPECT_EQ(Data(second.View(*info)), std::string(16, 'w'));
}

// Views point into aligned files, and to a copy where the file is not aligned.
TEST(Safetensors, UnalignedDataIsCopied) {
  for (size_t misalignment = 0; misalignment < 16; ++misalignment) {
    const std::string bytes = SafetensorsBuilder()
                                  .Add("byte", "U8", "[1]", "b")
                                  .Add("f64", "F64", "[1]", "12345678")
                                  .Add("f32", "F32", "[2]", "abcdefgh")
                                  .Add("bf16", "BF16", "[1]", "xy")
                                  .Bytes(1);
    const ExactBytes exact(bytes, misalignment);
    const SafetensorsFile file = SafetensorsFile::Parse("m", exact.span());
    const auto* begin = exact.span().data();
    for (const TensorInfo& info : file.tensors()) {
      const TensorView view = file.View(info);
      const size_t alignment = DTypeBytes(info.dtype);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % alignment, 0u) << info.name;
      const std::byte* in_file = begin + exact.span().size() - file.data_bytes() + info.begin;
      EXPECT_EQ(view.data == in_file, reinterpret_cast<uintptr_t>(in_file) % alignment == 0)
          << info.name;
      EXPECT_EQ(file.View(info).data, view.data) << "copied twice";
    }
    EXPECT_EQ(Data(file.View(*file.Find("f64"))), "12345678");
    EXPECT_EQ(Data(file.View(*file.Find("f32"))), "abcdefgh");
    EXPECT_EQ(Data(file.View(*file.Find("bf16"))), "xy");
  }
}

TEST(Safetensors, ManyThreadsShareOneCopy) {
  const std::string bytes = SafetensorsBuilder()
                                .Add("byte", "U8", "[1]", "b")
                                .Add("f64", "F64", "[1]", "12345678")
                                .Bytes();
  const SafetensorsFile file = SafetensorsFile::Parse("m", AsBytes(bytes));
  std::array<const std::byte*, 8> data{};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < data.size(); ++i)
    threads.emplace_back([&, i] { data[i] = file.View(*file.Find("f64")).data; });
  for (std::thread& thread : threads) thread.join();
  for (const std::byte* one : data) EXPECT_EQ(one, data[0]);
}

TEST(Safetensors, ViewOfAForeignInfoIsABug) {
  const std::string bytes = SmallFile();
  const SafetensorsFile file = SafetensorsFile::Parse("m", AsBytes(bytes));
  ExpectError(ErrorCode::kInternal, {}, [&] { file.View({"x", DType::kU8, Shape({1}), 23, 24}); });
  ExpectError(ErrorCode::kInternal, {}, [&] { file.View({"x", DType::kF32, Shape({1}), 0, 2}); });
}

// --- Faults, one by one ---

TEST(SafetensorsFaults, EveryPrefixOfAFileIsRefused) {
  const std::string bytes = SmallFile();
  for (size_t size = 0; size < bytes.size(); ++size) {
    ExpectError(kCorrupt, {"m.safetensors", "cut short"}, [&] { Parse(bytes.substr(0, size)); });
  }
  Parse(bytes);
}

// Every prefix of a header, with a length that matches: what a writer that crashed could leave.
TEST(SafetensorsFaults, EveryPrefixOfAHeaderIsRefused) {
  const std::string header =
      R"({"__metadata__":{"k":"v"},"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  for (size_t size = 0; size < header.size(); ++size) {
    ExpectError(kCorrupt, {"m.safetensors", "header"},
                [&] { Parse(SafetensorsBytes(header.substr(0, size), "1234")); });
  }
  Parse(SafetensorsBytes(header, "1234"));
}

// Bytes of a header replaced at random: refused or read, but neither crash nor sanitizer report.
TEST(SafetensorsFaults, RandomDamageIsSafe) {
  const std::string good = SmallFile();
  std::mt19937_64 random = testing::MakeRandom(1);
  size_t num_refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string bytes = good;
    for (uint64_t i = 0; i <= random() % 3; ++i)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    const ExactBytes exact(bytes);
    try {
      const SafetensorsFile file = SafetensorsFile::Parse("m", exact.span());
      for (const TensorInfo& info : file.tensors())
        EXPECT_EQ(Data(file.View(info)).size(), info.end - info.begin);
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == kCorrupt || error.code() == ErrorCode::kUnsupported)
          << error.message();
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, 0u);
}

TEST(SafetensorsFaults, ShorterThanTheLength) {
  ExpectError(kCorrupt, {"has 0 bytes", "at least 8"}, [] { Parse(""); });
  ExpectError(kCorrupt, {"has 7 bytes", "at least 8"}, [] { Parse(std::string(7, '\0')); });
}

TEST(SafetensorsFaults, HeaderLength) {
  ExpectError(kCorrupt, {"header", "length 0"}, [] { Parse(std::string(8, '\0')); });
  // One byte more than there is, and the first length above the limit.
  std::string bytes = SafetensorsBytes("{}", "");
  bytes[0] = 3;
  ExpectError(kCorrupt, {"cut short inside its header", "needs 11 bytes", "found 10", "1 missing"},
              [&] { Parse(bytes); });
  bytes.replace(0, 8, std::string("\x01\xe1\xf5\x05\0\0\0\0", 8));
  ExpectError(kCorrupt, {"header length is 100000001", "at most 100000000"}, [&] { Parse(bytes); });
  bytes.replace(0, 8, std::string("\0\0\0\0\0\0\0\x80", 8));
  ExpectError(kCorrupt, {"header length is 9223372036854775808"}, [&] { Parse(bytes); });
  bytes.replace(0, 8, std::string(8, '\xff'));
  ExpectError(kCorrupt, {"header length is 18446744073709551615"}, [&] { Parse(bytes); });
}

TEST(SafetensorsFaults, OtherFilesOfThisName) {
  ExpectError(kCorrupt, {"Git LFS pointer", "git lfs pull"},
              [] { Parse("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"); });
  ExpectError(kCorrupt, {"<!DOCTYPE html>", "may be no safetensors file"},
              [] { Parse("<!DOCTYPE html><html></html>"); });
}

TEST(SafetensorsFaults, NotAnObject) {
  ExpectRefused("[]", 0, {"not a JSON object", "[]"});
  ExpectRefused("null", 0, {"not a JSON object"});
  ExpectRefused("\"x\"", 0, {"not a JSON object"});
  // The format demands the brace as first byte, so that a header can be told from other data.
  ExpectRefused(" {}", 0, {"not a JSON object"});
  ExpectRefused("\xef\xbb\xbf{}", 0, {"not a JSON object"});
}

TEST(SafetensorsFaults, BadJsonNamesThePosition) {
  ExpectRefused(R"({"t":)", 0, {"not valid JSON", "at byte 14", "line 1, column 6"});
  ExpectRefused("{} x", 0, {"not valid JSON"});
  ExpectRefused("{}{}", 0, {"not valid JSON"});
  ExpectRefused("{'t':1}", 0, {"not valid JSON"});
  ExpectRefused(R"({"t":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}})", 4,
                {"not valid JSON"});
  using std::string_view_literals::operator""sv;
  ExpectRefused("{}\0{\"t\":1}"sv, 0, {"not valid JSON", "NUL at byte 10"});
}

TEST(SafetensorsFaults, BadUtf8NamesThePosition) {
  ExpectRefused("{\"\xff\":{}}", 0, {"not valid JSON", "at byte 11", "UTF-8"});
  ExpectRefused("{\"\xed\xa0\x80\":{}}", 0, {"not valid JSON"});
  ExpectRefused("{\"\\ud800\":{}}", 0, {"not valid JSON"});
}

TEST(SafetensorsFaults, DuplicateKeys) {
  constexpr std::string_view kT = R"("t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  ExpectRefused(Cat({"{", kT, ",", kT, "}"}), 0, {"tensor \"t\"", "twice"});
  ExpectRefused(R"({"__metadata__":{},"__metadata__":{}})", 0, {"\"__metadata__\" twice"});
  ExpectRefused(R"({"__metadata__":{"k":"a","k":"b"}})", 0, {"metadata key \"k\"", "twice"});
  ExpectRefused(R"({"t":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}})", 0,
                {"\"t\"", "\"dtype\" is there twice"});
  ExpectRefused(R"({"t":{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]}})", 0,
                {"\"shape\" is there twice"});
  ExpectRefused(R"({"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"data_offsets":[0,0]}})", 0,
                {"\"data_offsets\" is there twice"});
}

TEST(SafetensorsFaults, FieldsOfATensor) {
  ExpectRefused(R"({"t":{"shape":[0],"data_offsets":[0,0]}})", 0,
                {"\"t\"", "\"dtype\" is missing"});
  ExpectRefused(R"({"t":{"dtype":"U8","data_offsets":[0,0]}})", 0,
                {"\"t\"", "\"shape\" is missing"});
  ExpectRefused(R"({"t":{"dtype":"U8","shape":[0]}})", 0, {"\"t\"", "\"data_offsets\" is missing"});
  ExpectRefused(R"({"t":{}})", 0, {"\"t\"", "missing"});
  ExpectRefused(R"({"t":{"strides":[1]}})", 0, {"\"t\"", "unknown field \"strides\""});
  ExpectRefused(R"({"t":[]})", 0, {"\"t\"", "expected an object", "an array"});
  ExpectRefused(R"({"t":1})", 0, {"\"t\"", "expected an object", "found 1"});
  ExpectRefused(R"({"t":null})", 0, {"\"t\"", "expected an object", "null"});
  ExpectRefused(R"({"t":{"dtype":5}})", 0, {"\"t\"", "expected a string", "found 5"});
  ExpectRefused(R"({"t":{"dtype":{}}})", 0, {"\"t\"", "expected a string", "an object"});
  ExpectRefused(R"({"t":{"shape":"x"}})", 0, {"\"t\"", "expected an array", "\"x\""});
  ExpectRefused(R"({"t":{"shape":true}})", 0, {"\"t\"", "expected an array", "true"});
}

TEST(SafetensorsFaults, UnknownDTypes) {
  for (std::string_view dtype : {"F4", "F6_E2M3", "U16", "U32", "U64", "C64", "f32", "", "I128"}) {
    ExpectRefused(
        Cat({R"({"t":{"dtype":")", dtype, R"(","shape":[1],"data_offsets":[0,1]}})"}), 1,
        {"tensor \"t\"", Cat({"dtype \"", dtype, "\""}), "this build reads", "F32", "BF16", "BOOL"},
        ErrorCode::kUnsupported);
  }
}

TEST(SafetensorsFaults, Shapes) {
  const auto header = [](std::string_view shape) {
    return Cat({R"({"t":{"dtype":"F32","shape":)", shape, R"(,"data_offsets":[0,4]}})"});
  };
  for (std::string_view shape : {"[-1]", "[1.0]", "[null]", "[true]", "[\"1\"]", "[[1]]", "[{}]",
                                 "[-0]", "[18446744073709551616]"}) {
    ExpectRefused(header(shape), 4, {"\"t\"", "shape", "expected"});
  }
  // Products that wrap around 2^64, with and without the element size.
  for (std::string_view shape :
       {"[4611686018427387904,4]", "[4294967296,4294967296]", "[9223372036854775808,2]",
        "[4611686018427387905]", "[18446744073709551615,18446744073709551615]"}) {
    ExpectRefused(header(shape), 4, {"\"t\"", "overflows"});
  }
  ExpectRefused(header("[2]"), 4, {"\"t\"", "shape [2] of F32 needs 8 bytes", "[0, 4] hold 4"});
  ExpectRefused(header("[0]"), 4, {"\"t\"", "needs 0 bytes", "hold 4"});
}

TEST(SafetensorsFaults, Offsets) {
  const auto header = [](std::string_view offsets) {
    return Cat({R"({"t":{"dtype":"U8","shape":[4],"data_offsets":)", offsets, "}}"});
  };
  ExpectRefused(header("[4,0]"), 4, {"\"t\"", "reversed", "begin 4", "end 0"});
  ExpectRefused(header("[-4,0]"), 4, {"\"t\"", "data_offsets", "found -4"});
  ExpectRefused(header("[0,4.0]"), 4, {"\"t\"", "data_offsets", "found 4.0"});
  ExpectRefused(header("[0]"), 4, {"\"t\"", "data_offsets has 1 values"});
  ExpectRefused(header("[]"), 4, {"\"t\"", "data_offsets has 0 values"});
  ExpectRefused(header("[0,4,4]"), 4, {"\"t\"", "data_offsets", "expected two"});
  ExpectRefused(header("[0,5]"), 5, {"\"t\"", "needs 4 bytes", "hold 5"});
  ExpectRefused(header("[18446744073709551612,18446744073709551616]"), 4,
                {"\"t\"", "data_offsets"});
  ExpectRefused(header("[18446744073709551611,18446744073709551615]"), 4, {"\"t\"", "gap"});
  ExpectRefused(header("[1,5]"), 5, {"\"t\"", "gap of 1 bytes"});
}

TEST(SafetensorsFaults, OverlapsAndGaps) {
  const auto header = [](std::string_view second) {
    return Cat({R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)",
                R"("b":{"dtype":"U8","shape":[4],"data_offsets":)", second, "}}"});
  };
  ExpectRefused(header("[2,6]"), 6, {"tensor \"b\"", "[2, 6)", "overlap", "\"a\" [0, 4)"});
  ExpectRefused(header("[0,4]"), 4, {"tensor \"b\"", "overlap", "\"a\""});
  ExpectRefused(header("[6,10]"), 10, {"tensor \"b\"", "byte 6", "expected 4", "gap of 2 bytes"});
}

// Bug log 40: a file that was cut or has grown.
TEST(SafetensorsFaults, CutOrGrownFiles) {
  const std::string good = SafetensorsBuilder()
                               .Add("first", "U8", "[3000]", std::string(3000, 'a'))
                               .Add("second", "U8", "[5000]", std::string(5000, 'b'))
                               .Bytes();
  ExpectError(kCorrupt, {"m.safetensors", "8000 bytes", "found 7999", "1 missing", "\"second\""},
              [&] { Parse(good.substr(0, good.size() - 1)); });
  ExpectError(kCorrupt, {"m.safetensors", "found 3904", "4096 missing", "\"second\""},
              [&] { Parse(good.substr(0, good.size() - 4096)); });
  ExpectError(kCorrupt, {"5001 missing", "\"first\""},
              [&] { Parse(good.substr(0, good.size() - 5001)); });
  ExpectError(kCorrupt, {"m.safetensors", "too long", "8000 bytes", "found 8001", "1 extra"},
              [&] { Parse(good + "x"); });
  ExpectRefused("{}", 1, {"too long", "1 extra"});
}

TEST(SafetensorsFaults, Names) {
  ExpectRefused(R"({"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, {"empty name"});
  ExpectRefused(R"({"a\u0000b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0,
                {"\"a\\x00b\"", "NUL"});
}

TEST(SafetensorsFaults, Metadata) {
  for (std::string_view value : {"1", "null", "true", "[]", "{}", "1.5", "-1"}) {
    ExpectRefused(Cat({R"({"__metadata__":{"k":)", value, "}}"}), 0,
                  {"metadata key \"k\"", "expected a string"});
  }
  for (std::string_view value : {"1", "null", "\"x\"", "[]"}) {
    ExpectRefused(Cat({R"({"__metadata__":)", value, "}"}), 0,
                  {"\"__metadata__\"", "expected an object"});
  }
}

TEST(SafetensorsFaults, DeepNestingDoesNotRecurse) {
  const std::string deep(1 << 20, '[');
  ExpectRefused(Cat({"{\"t\":", deep}), 0, {"expected an object"});
  ExpectRefused(Cat({"{\"t\":{\"shape\":", deep}), 0, {"shape", "an array"});
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  ExpectRefused(objects, 0, {"unknown field \"a\""});
}

// --- Writing ---

struct Owned {
  std::vector<std::byte> bytes;
  NamedTensor tensor;
};

Owned MakeTensor(std::mt19937_64& random, std::string name, DType dtype, Shape shape) {
  Owned owned{{}, {std::move(name), {nullptr, dtype, shape}}};
  owned.bytes.resize(owned.tensor.view.NumBytes());
  for (std::byte& byte : owned.bytes) byte = static_cast<std::byte>(random());
  owned.tensor.view.data = owned.bytes.data();
  return owned;
}

TEST(WriteSafetensors, RoundTrip) {
  std::mt19937_64 random = testing::MakeRandom(2);
  std::vector<Owned> owned;
  owned.push_back(MakeTensor(random, "bytes", DType::kU8, Shape({3})));
  owned.push_back(MakeTensor(random, "model.layers.0.w", DType::kBF16, Shape({5, 7})));
  owned.push_back(
      MakeTensor(random, "quote\" back\\slash \n \xe2\x82\xac", DType::kF32, Shape({2, 1, 3})));
  owned.push_back(MakeTensor(random, "scalar", DType::kF64, Shape()));
  owned.push_back(MakeTensor(random, "empty", DType::kI64, Shape({0, 4})));
  std::vector<NamedTensor> tensors;
  for (const Owned& one : owned) tensors.push_back(one.tensor);
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"\"", "\t"}};

  const TempFolder folder;
  WriteSafetensors(folder / "m.safetensors", tensors, metadata);
  EXPECT_EQ(folder.Names(), std::vector<std::string>{"m.safetensors"})
      << "a temporary file was left";
  const std::string bytes = folder.Read("m.safetensors");
  const SafetensorsFile file = SafetensorsFile::Parse("m.safetensors", AsBytes(bytes));
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.tensors().size(), tensors.size());
  EXPECT_EQ((bytes.size() - file.data_bytes()) % 8, 0u);
  for (const NamedTensor& tensor : tensors) {
    const TensorInfo* info = file.Find(tensor.name);
    ASSERT_NE(info, nullptr) << tensor.name;
    EXPECT_EQ(info->dtype, tensor.view.dtype);
    EXPECT_EQ(info->shape, tensor.view.shape);
    EXPECT_EQ(info->begin % DTypeBytes(info->dtype), 0u) << tensor.name << " is not aligned";
    EXPECT_EQ(Data(file.View(*info)), Data(tensor.view));
  }

  WriteSafetensors(folder / "again.safetensors", tensors, metadata);
  EXPECT_EQ(folder.Read("again.safetensors"), bytes);
}

TEST(WriteSafetensors, NothingAtAll) {
  const TempFolder folder;
  WriteSafetensors(folder / "m.safetensors", {});
  EXPECT_TRUE(SafetensorsFile::Parse("m", AsBytes(folder.Read("m.safetensors"))).tensors().empty());
}

TEST(WriteSafetensors, ReplacesAFileAndFollowsALink) {
  const TempFolder folder;
  folder.Write("old", "old");
  fs::create_symlink("old", folder / "link");
  folder.Write("m", "old");
  WriteSafetensors(folder / "m", {});
  WriteSafetensors(folder / "link", {});
  EXPECT_EQ(folder.Read("m"), SafetensorsBytes("{}      ", ""));
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(folder.Read("old"), folder.Read("m"));
}

TEST(WriteSafetensors, RelativePathAndLongName) {
  const TempFolder folder;
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  const std::string name(255, 'n');
  EXPECT_NO_THROW(WriteSafetensors("m.safetensors", {}));
  EXPECT_NO_THROW(WriteSafetensors(name, {}));
  fs::current_path(before);
  EXPECT_EQ(folder.Names(), (std::vector<std::string>{"m.safetensors", name}));
}

TEST(WriteSafetensors, BadTensorsAreRefusedBeforeAnythingIsWritten) {
  const std::array<std::byte, 8> data{};
  const TensorView ok{data.data(), DType::kU8, Shape({8})};
  constexpr auto kCode = ErrorCode::kInvalidArgument;
  const TempFolder folder;
  const auto write = [&](std::vector<NamedTensor> tensors,
                         std::map<std::string, std::string> metadata = {}) {
    WriteSafetensors(folder / "m", tensors, metadata);
  };
  ExpectError(kCode, {(folder / "m").string(), "empty name"}, [&] { write({{"", ok}}); });
  ExpectError(kCode, {"\"a\\x00\"", "NUL"}, [&] { write({{std::string("a\0", 2), ok}}); });
  ExpectError(kCode, {"\"__metadata__\"", "reserved"}, [&] { write({{"__metadata__", ok}}); });
  ExpectError(kCode, {"\"a\"", "twice"}, [&] { write({{"a", ok}, {"b", ok}, {"a", ok}}); });
  ExpectError(kCode, {"\"\\xff\"", "UTF-8"}, [&] { write({{"\xff", ok}}); });
  ExpectError(kCode, {"UTF-8"}, [&] { write({}, {{"k", "\xff"}}); });
  ExpectError(kCode, {"\"a\"", "no data"}, [&] {
    write({{"a", {nullptr, DType::kU8, Shape({8})}}});
  });
  constexpr size_t kHuge = size_t{1} << 63;
  ExpectError(kCode, {"\"a\"", "overflows"}, [&] {
    write({{"a", {data.data(), DType::kU8, Shape({kHuge, 2})}}});
  });
  ExpectError(kCode, {"\"a\"", "overflows"}, [&] {
    write({{"a", {data.data(), DType::kF32, Shape({kHuge})}}});
  });
  ExpectError(kCode, {"sum", "overflows"}, [&] {
    write({{"a", {data.data(), DType::kU8, Shape({kHuge})}},
           {"b", {data.data(), DType::kU8, Shape({kHuge})}}});
  });
  EXPECT_TRUE(folder.Names().empty());
}

TEST(WriteSafetensors, UnwritablePathsNameTheReason) {
  const TempFolder folder;
  folder.Write("file", "x");
  fs::create_directory(folder / "folder");
  constexpr auto kCode = ErrorCode::kInvalidArgument;
  ExpectError(kCode, {(folder / "folder").string(), "is a folder"},
              [&] { WriteSafetensors(folder / "folder", {}); });
  ExpectError(kCode, {"is a folder"}, [&] { WriteSafetensors((folder / "folder") / "", {}); });
  ExpectError(kCode, {"absent/m", "folder does not exist"},
              [&] { WriteSafetensors(folder / "absent/m", {}); });
  ExpectError(kCode, {"file/m", "Not a directory"},
              [&] { WriteSafetensors(folder / "file/m", {}); });
  ExpectError(kCode, {"too long"}, [&] { WriteSafetensors(folder / std::string(300, 'n'), {}); });
  EXPECT_EQ(folder.Names(), (std::vector<std::string>{"file", "folder"}));
}

TEST(WriteSafetensors, FolderWithoutPermission) {
  const TempFolder folder;
  fs::permissions(folder.path(), fs::perms(0555));
  {
    const testing::OrdinaryUser user;
    if (!user.is_ordinary()) GTEST_SKIP() << "cannot become another user";
    ExpectError(ErrorCode::kUnavailable, {(folder / "m").string(), "Permission denied"},
                [&] { WriteSafetensors(folder / "m", {}); });
  }
  fs::permissions(folder.path(), fs::perms(0755));
  EXPECT_TRUE(folder.Names().empty());
}

// A disk that fills up, played by a limit on the size of files: the old file stays, and no other
// remains.
TEST(WriteSafetensors, FailureWhileWritingLeavesNoHalfFile) {
  const TempFolder folder;
  folder.Write("m", "old");
  const std::vector<std::byte> data(100'000);
  const NamedTensor tensor{"t", {data.data(), DType::kU8, Shape({data.size()})}};

  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{50'000, before.rlim_max};
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  ExpectError(ErrorCode::kUnavailable,
              {(folder / "m").string(), "cannot be written", "File too large"}, [&] {
                WriteSafetensors(folder / "m", {&tensor, 1});
              });
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(folder.Names(), std::vector<std::string>{"m"});
  EXPECT_EQ(folder.Read("m"), "old");
}

// What other writers make: the recorded references, which also hold I32 and I64.
TEST(Safetensors, ReadsAllGoldenReferences) {
  SY_SKIP_WITHOUT_GOLDENS();
  size_t num_read = 0;
  for (const auto& golden : fs::directory_iterator(*testing::GoldenDir() / "models")) {
    std::ifstream stream(golden.path() / "expected.safetensors", std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
    const SafetensorsFile file = SafetensorsFile::Parse("expected.safetensors", AsBytes(bytes));
    EXPECT_NE(file.Find("p0.logits"), nullptr) << golden.path();
    ++num_read;
  }
  EXPECT_GE(num_read, 56u);
}

}  // namespace
}  // namespace switchyard
