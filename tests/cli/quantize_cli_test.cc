// Verb quantize as its users run it: a killed run, refusals, the report, tokenizers that follow.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "program.h"
#include "testing/goldens.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class QuantizeCli : public ProgramTest {
 protected:
  QuantizeCli() {
    fs::create_directories(folder_ / "a");
    fs::create_directories(folder_ / "b");
  }

  static std::string DefaultModel() { return (testing::SourceDir() / "models/default").string(); }
  std::string Path(const char* name) const { return (folder_ / name).string(); }
};

TEST_F(QuantizeCli, AKilledRunIsContinuedToTheSameBytes) {
  const std::string whole = Path("a/m.gguf"), out = Path("b/m.gguf");
  ASSERT_EQ(Run({"quantize", DefaultModel(), whole, "--scheme", "Q3_K"}).status, 0);
  const pid_t pid = Start({"quantize", DefaultModel(), out, "--scheme", "Q3_K", "--threads", "1"});
  // As soon as there is something to leave behind; wherever it is then.
  for (int i = 0; i < 5000 && !fs::exists(out + ".partial/m.gguf") && !fs::exists(out); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  kill(pid, SIGKILL);
  Wait(pid);
  if (!fs::exists(out)) {
    const Outcome again = Run({"quantize", DefaultModel(), out, "--scheme", "Q3_K"});
    ASSERT_EQ(again.status, 0) << again.err;
    EXPECT_EQ(again.err, "") << "nothing but results without a terminal";
  }
  EXPECT_EQ(ReadAll(out), ReadAll(whole));
  EXPECT_FALSE(fs::exists(out + ".partial"));
}

TEST_F(QuantizeCli, TheTokenizerFollowsIntoGgufAndBack) {
  const std::string text =
      "Hello, it's 42 o'clock!\n\n  na\xc3\xafve \xe6\xbc\xa2\xe5\xad\x97 <|im_start|>user";
  for (const std::string& model :
       {DefaultModel(),
        (testing::LocalGoldenDir() / "qwen3_moe_with_tokenizer/checkpoint").string()}) {
    const std::string gguf = Path("t.gguf"), back = Path("back");
    ASSERT_EQ(Run({"quantize", model, gguf, "--scheme", "gguf-bf16", "--force"}).status, 0);
    const Outcome outcome = Run({"quantize", gguf, back, "--scheme", "bf16", "--force"});
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const std::string ids = Run({"tokenize", model, "--text", text, "--ids"}).out;
    EXPECT_FALSE(ids.empty());
    EXPECT_EQ(Run({"tokenize", gguf, "--text", text, "--ids"}).out, ids);
    EXPECT_EQ(Run({"tokenize", back, "--text", text, "--ids"}).out, ids);
    const std::vector<std::string> answer = {"-p",     "Hello", "-n",          "8",
                                             "--temp", "0",     "--act-dtype", "f32"};
    std::vector<std::string> of_model = {"run", model}, of_gguf = {"run", gguf};
    of_model.insert(of_model.end(), answer.begin(), answer.end());
    of_gguf.insert(of_gguf.end(), answer.begin(), answer.end());
    EXPECT_EQ(Run(of_gguf).out, Run(of_model).out) << "through the chat template";
  }
}

TEST_F(QuantizeCli, TheReportAsJsonAndForPeople) {
  const std::string text = Path("text");
  std::ofstream(text)
      << ReadAll(testing::SourceDir() / "models/default/heldout.txt").substr(0, 4000);
  Outcome outcome = Run(
      {"quantize", DefaultModel(), Path("j"), "--scheme", "w8a8_int8", "--json", "--text", text});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["scheme"], "w8a8_int8");
  EXPECT_LT(report["bytes_after"].get<size_t>(), report["bytes_before"].get<size_t>());
  EXPECT_NEAR(report["perplexity_after"].get<double>(), report["perplexity_before"].get<double>(),
              0.02 * report["perplexity_before"].get<double>());
  size_t quantised = 0;
  for (const json& tensor : report["tensors"]) {
    if (tensor["to"] != "I8, a scale per output") {
      EXPECT_EQ(tensor["max_error"], 0.0) << tensor["name"];
      continue;
    }
    ++quantised;
    EXPECT_GT(tensor["rms_error"].get<double>(), 0.001);
    EXPECT_LT(tensor["rms_error"].get<double>(), 0.02) << tensor["name"];
  }
  EXPECT_EQ(quantised, 2u * (4 + 3 * 8)) << "q, k, v, o and three products of 8 experts";
  // Perplexity of OUT as eval gives it.
  const json eval = json::parse(Run({"eval", Path("j"), "--text", text, "--json"}).out);
  EXPECT_EQ(eval["perplexity"], report["perplexity_after"]);

  outcome = Run({"quantize", DefaultModel(), Path("h"), "--scheme", "w4a16_g128"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("bits per weight"), std::string::npos) << outcome.out;
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '%'), 10) << "the worst ten";
}

TEST_F(QuantizeCli, Refusals) {
  const std::string out = Path("model");
  ASSERT_EQ(Run({"quantize", DefaultModel(), out, "--scheme", "fp8_block"}).status, 0);
  const auto refuse = [&](const std::vector<std::string>& arguments, const std::string& word,
                          int status = 1) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_NE(outcome.err.find(word), std::string::npos) << outcome.err;
  };
  refuse({"quantize", DefaultModel(), out, "--scheme", "mxfp4"}, "--force");
  refuse({"quantize", DefaultModel(), DefaultModel(), "--scheme", "mxfp4", "--force"}, "OUT is IN");
  refuse({"quantize", DefaultModel(), DefaultModel() + "/sub", "--scheme", "mxfp4"}, "lies in IN");
  refuse({"quantize", DefaultModel(), Path("x"), "--scheme", "q9"}, "there is no scheme \"q9\"");
  refuse({"quantize", Path("nothing"), Path("x"), "--scheme", "bf16"}, "no such folder");
  refuse({"quantize", DefaultModel(), Path("x")}, "--scheme", 2);
  // Decoding a quantised checkpoint is done, and warned of.
  const Outcome outcome = Run({"quantize", out, Path("again"), "--scheme", "mxfp4"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_NE(outcome.err.find("is quantised already"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace switchyard
