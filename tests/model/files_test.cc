#include "switchyard/model/files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "testing/safetensors_builder.h"

namespace switchyard {
namespace {

using testing::AsBytes;
using testing::ExpectError;
using testing::OrdinaryUser;
using testing::TempFolder;
namespace fs = std::filesystem;

TEST(ModelFiles, ReadsAFolder) {
  const TempFolder folder;
  folder.Write("config.json", "{}");
  folder.Write("weights.bin", std::string("a\0b", 3));
  folder.Write("empty", "");
  fs::create_directory(folder / "onnx");
  const auto files = ModelFiles::OpenFolder(folder.path());

  EXPECT_EQ(files->Names(), (std::vector<std::string>{"config.json", "empty", "weights.bin"}));
  EXPECT_TRUE(files->Has("config.json"));
  EXPECT_FALSE(files->Has("onnx"));
  EXPECT_FALSE(files->Has("absent"));
  EXPECT_EQ(files->ReadText("config.json"), "{}");
  EXPECT_EQ(files->ReadText("weights.bin"), std::string("a\0b", 3));
  EXPECT_EQ(files->description(), folder.path().string());
  EXPECT_EQ(files->PathOf("config.json"), (folder / "config.json").string());
}

TEST(ModelFiles, EmptyFileGivesAnEmptySpan) {
  const TempFolder folder;
  folder.Write("empty", "");
  const auto files = ModelFiles::OpenFolder(folder.path());
  EXPECT_TRUE(files->Map("empty").empty());
  EXPECT_EQ(files->ReadText("empty"), "");
}

TEST(ModelFiles, MapsOnceAndKeepsTheBytes) {
  const TempFolder folder;
  folder.Write("a", "hello");
  const auto files = ModelFiles::OpenFolder(folder.path());
  const auto first = files->Map("a");
  // A file that is replaced later does not change what is mapped.
  fs::remove(folder / "a");
  folder.Write("a", "other");
  EXPECT_EQ(files->Map("a").data(), first.data());
  EXPECT_EQ(std::memcmp(first.data(), "hello", 5), 0);
}

// The hub cache stores the content under blobs/ and links to it.
TEST(ModelFiles, FollowsLinks) {
  const TempFolder folder;
  fs::create_directories(folder / "blobs");
  fs::create_directories(folder / "snapshots/abc");
  folder.Write("blobs/1234", "content");
  fs::create_symlink("../../blobs/1234", folder / "snapshots/abc/config.json");
  fs::create_directory_symlink("../../blobs", folder / "snapshots/abc/linked_folder");
  const auto files = ModelFiles::OpenFolder(folder / "snapshots/abc");
  EXPECT_EQ(files->Names(), std::vector<std::string>{"config.json"});
  EXPECT_EQ(files->ReadText("config.json"), "content");
}

TEST(ModelFiles, LinkThatLeadsNowhereIsExplained) {
  const TempFolder folder;
  fs::create_symlink("gone", folder / "model.safetensors");
  const auto files = ModelFiles::OpenFolder(folder.path());
  EXPECT_TRUE(files->Has("model.safetensors"));
  ExpectError(ErrorCode::kNotFound, {"model.safetensors", "link", "does not exist", "download"},
              [&] { files->Map("model.safetensors"); });
}

TEST(ModelFiles, LinkToItselfIsUnreadable) {
  const TempFolder folder;
  fs::create_symlink("loop", folder / "loop");
  const auto files = ModelFiles::OpenFolder(folder.path());
  ExpectError(ErrorCode::kUnavailable, {"loop", "cannot be read"}, [&] { files->Map("loop"); });
}

TEST(ModelFiles, PipeIsRefusedWithoutWaiting) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const auto files = ModelFiles::OpenFolder(folder.path());
  ExpectError(ErrorCode::kUnavailable, {"pipe", "expected a regular file"},
              [&] { files->Map("pipe"); });
}

TEST(ModelFiles, UnreadableFilesAndFoldersNameTheReason) {
  const TempFolder folder;
  folder.Write("secret", "x");
  fs::create_directory(folder / "locked");
  fs::create_directory(folder / "locked/model");
  fs::permissions(folder.path(), fs::perms(0755));
  fs::permissions(folder / "secret", fs::perms::none);
  fs::permissions(folder / "locked", fs::perms::none);
  {
    const OrdinaryUser user;
    if (!user.is_ordinary()) GTEST_SKIP() << "cannot become another user";
    const auto files = ModelFiles::OpenFolder(folder.path());
    ExpectError(ErrorCode::kUnavailable, {"secret", "Permission denied"},
                [&] { files->Map("secret"); });
    ExpectError(ErrorCode::kUnavailable, {"locked", "cannot be listed", "Permission denied"},
                [&] { ModelFiles::OpenFolder(folder / "locked"); });
    ExpectError(ErrorCode::kUnavailable, {"locked/model", "Permission denied"},
                [&] { ModelFiles::OpenFolder(folder / "locked/model"); });
  }
  fs::permissions(folder / "locked", fs::perms::owner_all);
}

TEST(ModelFiles, FileRemovedAfterOpeningIsNotFound) {
  const TempFolder folder;
  folder.Write("a", "x");
  const auto files = ModelFiles::OpenFolder(folder.path());
  fs::remove(folder / "a");
  ExpectError(ErrorCode::kNotFound, {"a: ", "removed"}, [&] { files->Map("a"); });
}

TEST(ModelFiles, FileReplacedByAFolderIsRefused) {
  const TempFolder folder;
  folder.Write("a", "x");
  const auto files = ModelFiles::OpenFolder(folder.path());
  fs::remove(folder / "a");
  fs::create_directory(folder / "a");
  ExpectError(ErrorCode::kNotFound, {"is a folder, expected a file"}, [&] { files->Map("a"); });
}

TEST(ModelFiles, AbsentFileNamesFileAndFolder) {
  const TempFolder folder;
  const auto files = ModelFiles::OpenFolder(folder.path());
  ExpectError(ErrorCode::kNotFound, {"\"config.json\"", folder.path().string()},
              [&] { files->Map("config.json"); });
  ExpectError(ErrorCode::kNotFound, {"\"config.json\""}, [&] { files->ReadText("config.json"); });
}

TEST(ModelFiles, SubfolderIsNoFile) {
  const TempFolder folder;
  fs::create_directory(folder / "onnx");
  const auto files = ModelFiles::OpenFolder(folder.path());
  ExpectError(ErrorCode::kNotFound, {"onnx", "is a folder, expected a file"},
              [&] { files->Map("onnx"); });
}

TEST(ModelFiles, NamesThatLeaveTheFolderAreRefused) {
  const TempFolder folder;
  fs::create_directory(folder / "model");
  fs::create_directory(folder / "model/sub");
  folder.Write("secret", "x");
  folder.Write("model/sub/file", "x");
  const auto files = ModelFiles::OpenFolder(folder / "model");
  const std::string absolute = (folder / "secret").string();
  const std::string_view names[] = {"../secret", absolute, "sub/file", "..",
                                    ".",         "",       "a\\b",     std::string_view("a\0b", 3),
                                    "./x",       "x..y"};
  for (std::string_view name : names) {
    EXPECT_FALSE(ModelFiles::IsPlainName(name)) << name;
    EXPECT_FALSE(files->Has(name)) << name;
    ExpectError(ErrorCode::kInvalidArgument, {"not a plain file name"}, [&] { files->Map(name); });
  }
  for (std::string_view name : {"model.safetensors", ".gitattributes", "a b", "-", "m-1-of-2"}) {
    EXPECT_TRUE(ModelFiles::IsPlainName(name)) << name;
  }
}

TEST(ModelFiles, OpenFolderRefusesWhatIsNoFolder) {
  const TempFolder folder;
  folder.Write("model.gguf", "x");
  ExpectError(ErrorCode::kNotFound, {"/absent", "no such folder"},
              [&] { ModelFiles::OpenFolder(folder / "absent"); });
  ExpectError(ErrorCode::kNotFound, {"model.gguf", "is a file, expected a folder"},
              [&] { ModelFiles::OpenFolder(folder / "model.gguf"); });
  ExpectError(ErrorCode::kNotFound, {"model.gguf"},
              [&] { ModelFiles::OpenFolder(folder / "model.gguf/x"); });
  ExpectError(ErrorCode::kNotFound, {}, [&] { ModelFiles::OpenFolder(""); });
}

TEST(ModelFiles, RootOfAHubCachePointsToTheSnapshot) {
  const TempFolder folder;
  for (const char* name : {"blobs", "refs", "snapshots/0123abc"})
    fs::create_directories(folder / name);
  ExpectError(ErrorCode::kNotFound, {"hub cache", "snapshots/0123abc"},
              [&] { ModelFiles::OpenFolder(folder.path()); });
}

TEST(ModelFiles, FromMemory) {
  const std::string config = "{}";
  const auto files = ModelFiles::FromMemory("embedded default model",
                                            {{"config.json", AsBytes(config)}, {"a.txt", {}}});
  EXPECT_EQ(files->Names(), (std::vector<std::string>{"a.txt", "config.json"}));
  EXPECT_TRUE(files->Has("config.json"));
  EXPECT_EQ(files->Map("config.json").data(), AsBytes(config).data());
  EXPECT_EQ(files->ReadText("a.txt"), "");
  EXPECT_EQ(files->description(), "embedded default model");
  EXPECT_EQ(files->PathOf("config.json"), "config.json (embedded default model)");
  ExpectError(ErrorCode::kNotFound, {"embedded default model", "\"b\""}, [&] { files->Map("b"); });
  ExpectError(ErrorCode::kInvalidArgument, {"\"../b\"", "plain"}, [&] { files->Map("../b"); });
}

TEST(ModelFiles, FromMemoryRefusesBadNames) {
  ExpectError(ErrorCode::kInvalidArgument, {"embedded", "\"a/b\""}, [] {
    ModelFiles::FromMemory("embedded", {{"a/b", {}}});
  });
  ExpectError(ErrorCode::kInvalidArgument, {"embedded", "\"a\"", "two files"}, [] {
    ModelFiles::FromMemory("embedded", {{"a", {}}, {"a", {}}});
  });
}

TEST(ModelFiles, ManyThreadsMapTheSameFile) {
  const TempFolder folder;
  folder.Write("a", "hello");
  folder.Write("b", "world");
  const auto files = ModelFiles::OpenFolder(folder.path());
  std::atomic<size_t> num_right = 0;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      if (files->ReadText("a") == "hello" && files->ReadText("b") == "world") ++num_right;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_right, 8u);
}

}  // namespace
}  // namespace switchyard
