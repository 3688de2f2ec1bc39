// The program as its users run it: every verb, every documented refusal, exit statuses and where
// output goes.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <thread>

#include "program.h"
#include "switchyard/core/cpu.h"
#include "switchyard/model/files.h"
#include "switchyard/model/safetensors.h"
#include "testing/goldens.h"
#include "testing/model_folder.h"

namespace switchyard {
namespace {

using nlohmann::json;

class Cli : public ProgramTest {
 protected:
  // Runs, and expects a refusal: exit 1, nothing on standard output, one or two lines that contain
  // all words.
  void ExpectRefusal(const std::vector<std::string>& arguments,
                     const std::vector<std::string>& words, int status = 1) {
    const Outcome outcome = Run(arguments);
    std::string command;
    for (const std::string& argument : arguments) command += argument.substr(0, 60) + " ";
    EXPECT_EQ(outcome.status, status) << command << outcome.err;
    EXPECT_EQ(outcome.out, "") << command;
    for (const std::string& word : words)
      EXPECT_NE(outcome.err.find(word), std::string::npos) << command << "\n" << outcome.err;
    if (status == 1) {
      EXPECT_LE(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 2)
          << command << outcome.err;
    }
  }

  static std::string Golden(const std::string& name) {
    return (testing::LocalGoldenDir() / name / "checkpoint").string();
  }
};

TEST_F(Cli, TheDefaultModelContinuesTheModelCardsPrompts) {
  const json expected = json::parse(ReadAll(testing::SourceDir() / "models/default/expected.json"));
  for (const json& row : expected["greedy"]) {
    const std::string count = std::to_string(row["ids"].size());
    const std::string text = row["text"].get<std::string>() + "\n";
    Outcome outcome = Run(
        {"run", "--raw", "-p", row["rendered"], "-n", count, "--temp", "0", "--act-dtype", "f32"});
    EXPECT_EQ(outcome.out, text) << row["prompt"];
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.err, "") << "nothing but results without a terminal";
    if (row["kind"] == "chat") {
      outcome = Run({"run", "-p", row["prompt"], "-n", count, "--temp", "0", "--act-dtype", "f32"});
      EXPECT_EQ(outcome.out, text) << "through the chat template";
    }
  }
}

TEST_F(Cli, PerplexityOfTheHeldOutText) {
  const Outcome outcome = Run(
      {"eval", "--text", (testing::SourceDir() / "models/default/heldout.txt").string(), "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json result = json::parse(outcome.out);
  const json expected =
      json::parse(ReadAll(testing::SourceDir() / "models/default/expected.json"))["heldout"];
  EXPECT_NEAR(result["perplexity"].get<double>(), expected["perplexity"].get<double>(), 0.005);
  EXPECT_EQ(result["scored_tokens"], expected["scored_tokens"]);
  EXPECT_EQ(result["windows"], expected["windows"]);
}

// Text in, text out, with a tokenizer and a padded vocabulary.
TEST_F(Cli, GoldenModelEndToEnd) {
  const json e2e =
      json::parse(ReadAll(testing::LocalGoldenDir() / "qwen3_moe_with_tokenizer" / "e2e.json"));
  for (const json& row : e2e["cases"]) {
    const Outcome ids = Run({"tokenize", Golden("qwen3_moe_with_tokenizer"), "--text",
                             row["prompt"], "--no-special-tokens"});
    std::string expected_ids;
    for (const json& id : row["ids"]) expected_ids += (expected_ids.empty() ? "" : ",") + id.dump();
    EXPECT_EQ(ids.out, expected_ids + "\n");
    const std::string count = std::to_string(row["greedy_ids_ignoring_eos"].size());
    const Outcome answer = Run({"run", Golden("qwen3_moe_with_tokenizer"), "--raw", "-p",
                                row["prompt"], "-n", count, "--temp", "0", "--act-dtype", "f32"});
    EXPECT_EQ(answer.out, row["text"].get<std::string>() + "\n") << row["prompt"];
  }
}

TEST_F(Cli, StopsOnTextAndHoldsBackItsBeginning) {
  const std::vector<std::string> base = {
      "run", "--raw",       "-p", "Once upon a time there was a", "-n", "64", "--temp",
      "0",   "--act-dtype", "f32"};
  std::vector<std::string> arguments = base;
  arguments.insert(arguments.end(), {"--stop", "real princess", "--stop", "never said"});
  EXPECT_EQ(Run(arguments).out,
            " prince who wanted to marry a princess; but she would have to be a \n");
}

// Every runner computes the same model.
TEST_F(Cli, OneTextFromEveryRunner) {
  std::vector<std::string> arguments{"run",         "--raw", "-p",           "Once upon a time",
                                     "-n",          "12",    "--temp",       "0",
                                     "--act-dtype", "f32",   "--moe-runner", "aiter"};
  const std::string text = Run(arguments).out;
  EXPECT_GT(text.size(), 20u);
  for (const char* runner : {"ascend", "reference"}) {
    arguments.back() = runner;
    EXPECT_EQ(Run(arguments).out, text) << runner;
  }
}

TEST_F(Cli, OneSeedOneText) {
  const std::vector<std::string> arguments = {"run", "--raw",  "-p", "The king", "-n",
                                              "30",  "--temp", "1",  "--seed",   "7"};
  const Outcome first = Run(arguments);
  EXPECT_EQ(Run(arguments).out, first.out);
  std::vector<std::string> other = arguments;
  other.back() = "8";
  EXPECT_NE(Run(other).out, first.out);
}

TEST_F(Cli, ChatReadsLinesAndEnds) {
  const Outcome outcome =
      Run({"run", "--temp", "0", "-n", "8"},
          "Tell me a story about a mouse.\nHi\n/clear\nHi\n/exit\nnever read\n");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 3) << outcome.out;
}

TEST_F(Cli, InterruptStopsCleanly) {
  // Through a scalar reference runner on one thread, so that it takes long enough to interrupt.
  const pid_t pid = Start({"run", "--raw", "-p", "Once upon", "-n", "400", "--temp", "1", "--seed",
                           "1", "--moe-runner", "reference", "--isa", "scalar", "--threads", "1"});
  for (int i = 0; i < 200 && ReadAll(folder_ / "out").empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  kill(pid, SIGINT);
  const Outcome outcome = Wait(pid);
  EXPECT_EQ(outcome.status, 130) << outcome.err;
  EXPECT_FALSE(outcome.out.empty());
  EXPECT_EQ(outcome.out.back(), '\n');
}

TEST_F(Cli, LogitsWritesWhatWasAskedFor) {
  const std::string output = (folder_ / "logits.safetensors").string();
  const Outcome outcome = Run({"logits", Golden("olmoe_clip"), "--ids", "1,2,3,4", "--output",
                               output, "--hidden", "0,1", "--routing", "--chunk", "3"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto files = ModelFiles::OpenFolder(folder_);
  const SafetensorsFile file = SafetensorsFile::Parse("logits", files->Map("logits.safetensors"));
  ASSERT_NE(file.Find("logits"), nullptr);
  EXPECT_EQ(file.Find("logits")->shape, (Shape{4, 256}));
  EXPECT_EQ(file.Find("hidden.1")->shape, (Shape{4, 48}));
  EXPECT_EQ(file.Find("routing.0.ids")->shape, (Shape{4, 3}));
  EXPECT_EQ(file.Find("routing.0.ids")->dtype, DType::kI32);
  EXPECT_EQ(file.Find("routing.1.weights")->dtype, DType::kF32);
}

TEST_F(Cli, LogitsFromAFileMatchTheRecord) {
  const std::string output = (folder_ / "logits.safetensors").string();
  const std::filesystem::path golden = testing::LocalGoldenDir() / "mixtral_swa";
  const Outcome outcome = Run({"logits", Golden("mixtral_swa"), "--ids-file",
                               (golden / "expected.safetensors").string(), "--tensor",
                               "p3.input_ids", "--output", output});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto written = ModelFiles::OpenFolder(folder_);
  const auto recorded = ModelFiles::OpenFolder(golden);
  const SafetensorsFile ours = SafetensorsFile::Parse("ours", written->Map("logits.safetensors"));
  const SafetensorsFile theirs =
      SafetensorsFile::Parse("theirs", recorded->Map("expected.safetensors"));
  const TensorView a = ours.View(*ours.Find("logits"));
  const TensorView b = theirs.View(*theirs.Find("p3.logits"));
  ASSERT_EQ(a.shape, b.shape);
  for (size_t i = 0; i < a.NumElements(); ++i) {
    ASSERT_NEAR(reinterpret_cast<const float*>(a.data)[i],
                reinterpret_cast<const float*>(b.data)[i], 1e-4);
  }
}

TEST_F(Cli, TokenizeBothWays) {
  EXPECT_EQ(Run({"tokenize", "--text", "Once upon a time"}).out, "49,1036,607,261,593\n");
  EXPECT_EQ(Run({"tokenize"}, "Once upon a time").out, "49,1036,607,261,593\n");
  EXPECT_EQ(Run({"tokenize", "--decode", "49,1036,607,261,593"}).out, "Once upon a time\n");
  EXPECT_EQ(Run({"tokenize", "--text", "<|im_end|>"}).out, "2\n");
  EXPECT_NE(Run({"tokenize", "--text", "<|im_end|>", "--plain"}).out, "2\n");
  std::ofstream(folder_ / "chat.json") << R"([{"role": "user", "content": "Hi <|im_end|>"}])";
  const std::string chat = (folder_ / "chat.json").string();
  EXPECT_EQ(Run({"tokenize", "--chat", chat, "--generation-prompt"}).out,
            "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n");
  const auto ends = [&](const std::string& ids) {
    size_t count = 0;
    for (size_t at = ids.find(",2,"); at != std::string::npos; at = ids.find(",2,", at + 1))
      ++count;
    return count;
  };
  EXPECT_EQ(ends(Run({"tokenize", "--chat", chat, "--ids"}).out), 2u);
  EXPECT_EQ(ends(Run({"tokenize", "--chat", chat, "--ids", "--safe"}).out), 1u)
      << "the user's text closes no turn";
  std::ofstream(folder_ / "own.jinja") << "{{ messages[0].content | upper }}";
  EXPECT_EQ(Run({"tokenize", "--chat", chat, "--template", (folder_ / "own.jinja").string()}).out,
            "HI <|IM_END|>");
}

TEST_F(Cli, InspectInfoConfigAndBenchSpeakJson) {
  const json inspected = json::parse(Run({"inspect", "--json", "--tensors", "--verify"}).out);
  EXPECT_EQ(inspected["config"]["architecture"], "qwen3_moe");
  EXPECT_EQ(inspected["config"]["experts"], 8);
  EXPECT_EQ(inspected["memory"]["weights_bytes"], 5641728 * 2);
  EXPECT_EQ(inspected["tensors"].size(), 69u);
  EXPECT_NE(inspected["verify"]["result"].get<std::string>().find("no NaN"), std::string::npos);
  EXPECT_EQ(inspected["plan"][1]["runner"], "aiter");
  const json info = json::parse(Run({"info", "--json", "--explain"}).out);
  EXPECT_GE(info["build"]["runners"].size(), 2u);
  EXPECT_EQ(info["build"]["architectures"].size(), 6u);
  EXPECT_GE(info["build"]["quant_methods"].size(), 12u);
  EXPECT_GE(info["build"]["quantize_schemes"].size(), 10u);
  EXPECT_EQ(info["build"]["ggml_types"].size(), 22u);
  EXPECT_EQ(info["build"]["kv_dtypes"], (json{"f32", "bf16", "f16", "fp8", "int8"}));
  EXPECT_FALSE(info["machine"]["target_chosen"].get<std::string>().empty());
  const json config = json::parse(Run({"config", "--json", "--threads", "1"}).out);
  EXPECT_EQ(config["threads"]["value"], "1");
  EXPECT_EQ(config["threads"]["source"], "--threads");
  const Outcome bench = Run({"bench", "--json", "-p", "16", "-n", "4", "-r", "1", "-b", "2"});
  ASSERT_EQ(bench.status, 0) << bench.err;
  const json measured = json::parse(bench.out);
  for (const char* key : {"pp_tps", "tg_tps", "load_s", "rss_gb", "read_gbps", "peak_gops",
                          "tg_share_of_limit", "pp_share_of_limit"}) {
    EXPECT_GT(measured[key].get<double>(), 0) << key;
  }
  EXPECT_GE(measured["int8_gops"].get<double>(), 0);
  EXPECT_EQ(measured["depth"], 0);
}

TEST_F(Cli, BenchProfilesARandomModel) {
  const std::string page = (folder_ / "profile.html").string();
  const Outcome bench =
      Run({"bench", "--shape", "tiny-qwen3moe:q4_k", "--layers", "1", "-p", "8", "-n", "2", "-r",
           "1", "-d", "70", "--profile", "--html", page, "--json"});
  ASSERT_EQ(bench.status, 0) << bench.err;
  const json measured = json::parse(bench.out);
  EXPECT_EQ(measured["depth"], 70);
  EXPECT_EQ(measured["weights"], "Q4_K");
  EXPECT_EQ(measured["peak_type"], measured["int8_gops"].get<double>() > 0 ? "int8" : "f32");
  for (const char* phase : {"prefill", "decode"}) {
    const json& profile = measured["profile"][phase];
    double seconds = 0;
    for (const json& stage : profile["stages"]) seconds += stage["seconds"].get<double>();
    EXPECT_NEAR(seconds, profile["seconds"].get<double>(), 1e-9);
    EXPECT_GE(profile["stages"].size(), 13u);
  }
  EXPECT_NE(ReadAll(page).find("</svg>"), std::string::npos);
  const Outcome table = Run({"bench", "--shape", "tiny-qwen3moe:f32", "--layers", "1", "-p", "8",
                             "-n", "2", "-r", "1", "--profile"});
  EXPECT_EQ(table.status, 0) << table.err;
  EXPECT_NE(table.out.find("gate and up"), std::string::npos) << table.out;
}

TEST_F(Cli, WrongUsageExitsWithTwo) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{},
                                                    {"no-such-verb"},
                                                    {"run", "--no-such-option"},
                                                    {"eval"},
                                                    {"run", "-n", "many"},
                                                    {"run", "-n", "-1"},
                                                    {"eval", "--text", "x", "--window", "-1"},
                                                    {"logits", "--output", "x"},
                                                    {"logits", "--ids", "1"}}) {
    EXPECT_EQ(Run(arguments).status, 2);
  }
  for (const char* verb :
       {"run", "bench", "eval", "logits", "tokenize", "inspect", "replay", "info", "config"}) {
    const Outcome help = Run({verb, "--help"});
    EXPECT_EQ(help.status, 0);
    EXPECT_NE(help.out.find("--"), std::string::npos);
  }
  EXPECT_EQ(Run({"--version"}).status, 0);
}

TEST_F(Cli, BadInputIsExplained) {
  const std::string out = (folder_ / "x.safetensors").string();
  ExpectRefusal({"run", "-p", "Hi", "-n", "0"}, {"-n must be at least 1"});
  ExpectRefusal({"run", "-p", ""}, {"prompt is empty"});
  ExpectRefusal({"run", "-p", "\xff\xfe"}, {"UTF-8", "offset 0"});
  ExpectRefusal({"run", "--raw", "-p", "a\xc3"}, {"UTF-8", "offset 1"});
  ExpectRefusal({"run", "-p", "Hi", "--threads", "0"}, {"--threads", "at least 1", "\"0\""});
  ExpectRefusal({"run", "-p", "Hi", "--isa", "neon"}, {"--isa", "scalar"});
  ExpectRefusal({"run", "-p", "Hi", "--top-p", "2"}, {"top_p", "2"});
  ExpectRefusal({"run", "-p", "Hi", "--moe-a2a", "deepep"}, {"--moe-a2a deepep"});
  ExpectRefusal({"run", "-p", "Hi", "--kv-dtype", "fp4"},
                {"--kv-dtype", "f32|bf16|f16|fp8|int8", "\"fp4\""});
  ExpectRefusal({"run", "-p", "Hi", "--ctx", "100000"}, {"--ctx 100000", "512"});
  ExpectRefusal({"run", "--raw", "-p", std::string(6000, 'x')}, {"tokens", "context of 512"});
  ExpectRefusal({"run", "no/such/folder", "-p", "Hi"}, {"no/such/folder"});
  ExpectRefusal({"run", Golden("olmoe_clip"), "-p", "Hi"}, {"tokenizer.json"});
  ExpectRefusal({"run", "model.gguf", "-p", "Hi"}, {"model.gguf", "no such file"});
  ExpectRefusal({"run", "-p", "Hi", "--raw", "--system", "Be brief."}, {"--system", "--raw"});
  ExpectRefusal({"logits", "--ids", "1,x", "--output", out}, {"\"x\"", "token id"});
  ExpectRefusal({"logits", "--ids", "", "--output", out}, {"no token ids"});
  ExpectRefusal({"logits", "--ids", "4096", "--output", out}, {"4096", "vocabulary"});
  ExpectRefusal({"logits", "--ids", "1", "--output", "/no/such/folder/x.safetensors"},
                {"/no/such/folder"});
  ExpectRefusal({"logits", "--ids", "1", "--output", out, "--hidden", "2"},
                {"--hidden 2", "0 to 1"});
  EXPECT_FALSE(std::filesystem::exists(out));
  ExpectRefusal({"eval", "--text", "no-such-file"}, {"no-such-file"});
  ExpectRefusal({"bench", "--shape", "olmo-1b-7b"}, {"olmoe-1b-7b"});
  ExpectRefusal({"bench", "--shape", "olmoe-1b-7b:q4_kk"}, {"q4_kk", "q4_k", "bf16", "nvfp4"});
  ExpectRefusal({"bench", "--shape", "gpt-oss-20b:q4_k", "--layers", "1"},
                {"2880 inputs", "256", "q8_0"});
  ExpectRefusal({"bench", "--html", "x.html"}, {"--html", "--profile"});
  ExpectRefusal({"bench", "--ep", "--profile"}, {"--ep", "--profile"});
  ExpectRefusal({"bench", "-d", "600"}, {"behind 600", "512"});
  ExpectRefusal({"bench", "-r", "0"}, {"at least 1"});
  ExpectRefusal({"tokenize", "--decode", "-5"}, {"-5"});
  for (Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    const std::vector<Isa> supported = SupportedIsas();
    if (std::find(supported.begin(), supported.end(), isa) != supported.end()) continue;
    ExpectRefusal({"run", "-p", "Hi", "--isa", std::string(IsaName(isa))},
                  {IsaName(isa).data(), "scalar"});
  }
}

TEST_F(Cli, DamagedCheckpointsAreExplained) {
  testing::ModelFolder folder(Golden("mixtral_swa"));
  folder.Write();
  const std::filesystem::path weights = folder.path() / "model.safetensors";
  const std::string out = (folder_ / "x.safetensors").string();
  const auto size = std::filesystem::file_size(weights);
  for (const auto& cut : {size - 1, size - 4096, std::uintmax_t{7}, std::uintmax_t{0}}) {
    folder.Write();
    std::filesystem::resize_file(weights, cut);
    ExpectRefusal({"logits", folder.path().string(), "--ids", "1", "--output", out},
                  {"model.safetensors"});
  }
  folder.Write();
  std::filesystem::resize_file(weights, size + 1);
  ExpectRefusal({"logits", folder.path().string(), "--ids", "1", "--output", out},
                {"model.safetensors"});
  folder.Write();
  std::ofstream(folder.path() / "config.json") << "{\"model_type\": ";
  ExpectRefusal({"inspect", folder.path().string()}, {"config.json"});
}

TEST_F(Cli, BadWeightsAreNamedByVerify) {
  testing::ModelFolder folder(Golden("mixtral_swa"));
  auto& bytes = folder.tensors.at("model.layers.1.self_attn.k_proj.weight").bytes;
  bytes[0] = std::byte{0xc0};
  bytes[1] = std::byte{0x7f};
  folder.Write();
  const Outcome verify = Run({"inspect", folder.path().string(), "--verify"});
  EXPECT_EQ(verify.status, 1);
  EXPECT_NE(verify.out.find("model.layers.1.self_attn.k_proj.weight: 1 NaN"), std::string::npos)
      << verify.out;
  const Outcome logits = Run({"logits", folder.path().string(), "--ids", "1,2", "--output",
                              (folder_ / "x.safetensors").string()});
  EXPECT_EQ(logits.status, 0);
  EXPECT_NE(logits.err.find("warning: model.layers.1.self_attn.k_proj.weight"), std::string::npos)
      << logits.err;
}

TEST_F(Cli, InspectTellsHowGgufFilesAreQuantised) {
  const std::filesystem::path file =
      testing::LocalGoldenDir() / "gguf/qwen3moe_mixed_q4_k_m/model-qwen3moe_mixed_q4_k_m.gguf";
  const json all =
      json::parse(Run({"inspect", file.string(), "--json", "--tensors", "--verify"}).out);
  EXPECT_EQ(all["config"]["architecture"], "qwen3_moe");
  EXPECT_EQ(all["gguf"]["version"], 3);
  EXPECT_EQ(all["gguf"]["tensor_types"]["Q4_K"], 5);
  EXPECT_EQ(all["gguf"]["tokenizer"], "gpt2");
  EXPECT_EQ(all["schemes"]["experts w13"][0]["format"], "Q4_K");
  EXPECT_EQ(all["schemes"]["experts w13"][0]["bits_per_weight"], 4.5);
  EXPECT_EQ(all["schemes"]["experts w2"][0]["format"], "Q6_K");
  EXPECT_EQ(all["schemes"]["attention"].size(), 2u);
  EXPECT_EQ(all["plan"][2]["part"], "experts w13 of 1 layers");
  EXPECT_EQ(all["plan"][2]["runner"], "aiter");
  EXPECT_EQ(all["tensors"].size(), 15u);
  EXPECT_EQ(all["tensors"][0]["use"], "model.embed_tokens.weight");
  EXPECT_TRUE(all["verify"]["problems"].empty());
  size_t bytes = 0;
  for (const auto& [part, rows] : all["schemes"].items()) {
    for (const json& row : rows) bytes += row["bytes"].get<size_t>();
  }
  EXPECT_EQ(bytes, all["memory"]["weights_bytes"]);
  // The scale of the last block of the last tensor.
  std::string damaged = ReadAll(file);
  const std::string& name = all["tensors"].back()["name"].get<std::string>();
  const size_t at = damaged.size() - (all["tensors"].back()["dtype"] == "Q6_K" ? 2 : 4);
  ASSERT_NE(all["tensors"].back()["dtype"], "Q4_K");
  damaged.replace(at, 2, "\xff\x7f");
  std::ofstream(folder_ / "damaged.gguf", std::ios::binary) << damaged;
  const Outcome verify = Run({"inspect", (folder_ / "damaged.gguf").string(), "--verify"});
  EXPECT_EQ(verify.status, 1);
  EXPECT_NE(verify.out.find("damaged.gguf: " + name + ": 1 NaN"), std::string::npos) << verify.out;
}

TEST_F(Cli, InspectTellsHowCheckpointsAreQuantised) {
  const std::string golden = Golden("quant/qwen3_moe_gptq_desc_act");
  const json all = json::parse(Run({"inspect", golden, "--json", "--verify"}).out);
  const json& experts = all["schemes"]["experts w2"][0];
  EXPECT_EQ(experts["scheme"], "gptq");
  EXPECT_EQ(experts["dtype"], "U4");
  EXPECT_EQ(experts["block"], (json{1, 32}));
  EXPECT_EQ(experts["activations"], "none");
  EXPECT_EQ(experts["elements"], 4 * 256 * 128);
  EXPECT_EQ(experts["layers"], 1);
  EXPECT_EQ(all["schemes"]["head"][0]["notes"][0]["modules"][0], "lm_head");
  EXPECT_LT(all["memory"]["mapped_bytes"], all["memory"]["weights_bytes"]);
  EXPECT_TRUE(all["verify"]["problems"].empty());

  testing::ModelFolder folder(golden);
  const std::string scales = "model.layers.1.mlp.experts.2.up_proj.scales";
  auto& bytes = folder.tensors.at(scales).bytes;
  bytes[2] = std::byte{0x00};  // f16 -1
  bytes[3] = std::byte{0xbc};
  const std::string order = "model.layers.1.mlp.experts.1.down_proj.g_idx";
  folder.tensors.at(order).bytes[3] = std::byte{0x40};
  folder.Write();
  const Outcome verify = Run({"inspect", folder.path().string(), "--verify"});
  EXPECT_EQ(verify.status, 1);
  EXPECT_NE(verify.out.find("model.safetensors: " + scales +
                            ": 0 NaN and 0 infinite and 1 negative scales, the first at [0, 1]"),
            std::string::npos)
      << verify.out;
  EXPECT_NE(verify.out.find("experts.1.down_proj"), std::string::npos) << verify.out;
  EXPECT_NE(verify.out.find("2 problems"), std::string::npos) << verify.out;
}

// What lies at the place of an output is not destroyed: links are followed, pipes are written into,
// the model's own files are refused.
TEST_F(Cli, OutputsRespectWhatIsThere) {
  const std::filesystem::path target = folder_ / "target.safetensors";
  std::ofstream(target) << "old";
  std::filesystem::permissions(
      target, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  const std::filesystem::path link = folder_ / "link.safetensors";
  std::filesystem::create_symlink(target, link);
  EXPECT_EQ(Run({"logits", "--ids", "1", "--output", link.string()}).status, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_GT(std::filesystem::file_size(target), 1000u);
  EXPECT_EQ(std::filesystem::status(target).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  const Outcome null = Run({"logits", "--ids", "1", "--output", "/dev/null"});
  EXPECT_EQ(null.status, 0) << null.err;
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  testing::ModelFolder folder(Golden("mixtral_swa"));
  folder.Write();
  ExpectRefusal({"logits", folder.path().string(), "--ids", "1", "--output",
                 (folder.path() / "model.safetensors").string()},
                {"file of the model itself"});
  ExpectRefusal({"logits", "--ids", "1", "--output", ""}, {"--output", "empty"});
}

TEST_F(Cli, AFullOrClosedOutputIsAFailure) {
  for (const std::string verb : {"config", "info", "tokenize --text hi", "run -p hi -n 3"}) {
    const std::string command =
        std::string(SY_PROGRAM) + " " + verb + " > /dev/full 2> " + (folder_ / "err").string();
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 1) << verb;
    EXPECT_NE(ReadAll(folder_ / "err").find("standard output"), std::string::npos) << verb;
  }
}

TEST_F(Cli, InspectRoutingShowsWhichExpertsFire) {
  const std::string text = (folder_ / "text.txt").string();
  const std::string page = (folder_ / "page.html").string();
  std::ofstream(text) << "Once upon a time there was a little engine that shunted wagons.";
  const Outcome table = Run({"inspect", "--routing", "--text", text, "--html", page});
  ASSERT_EQ(table.status, 0) << table.err;
  EXPECT_EQ(table.err, "");
  for (const char* word : {"embedded default model", "2 MoE layers", "hottest", "balancedness"})
    EXPECT_NE(table.out.find(word), std::string::npos) << table.out;
  const std::string html = ReadAll(page);
  EXPECT_NE(html.find("<svg"), std::string::npos);
  EXPECT_NE(html.find("layer 1, expert 7: "), std::string::npos);

  const Outcome machine = Run({"inspect", "--routing", "--text", text, "--json"});
  ASSERT_EQ(machine.status, 0) << machine.err;
  const json routing = json::parse(machine.out)["routing"];
  const size_t tokens = routing["tokens"];
  EXPECT_GT(tokens, 5u);
  ASSERT_EQ(routing["layers"].size(), 2u);
  size_t idle = 0;
  for (const json& layer : routing["layers"]) {
    size_t sum = 0, largest = 0;
    for (size_t count : layer["tokens"]) {
      sum += count;
      largest = std::max(largest, count);
      idle += count == 0 ? 1u : 0u;
    }
    EXPECT_EQ(sum, tokens * 2) << "every token goes to two experts";
    EXPECT_EQ(layer["hottest"]["tokens"], largest);
    EXPECT_NEAR(layer["balancedness"].get<double>(),
                static_cast<double>(tokens) * 2 / 8 / static_cast<double>(largest), 1e-4);
  }
  EXPECT_EQ(routing["idle"], idle);
  // The same counts from standard input, in pieces, by another kernel.
  const Outcome piped = Run({"inspect", "--routing", "--text", "-", "--json", "--chunk", "3",
                             "--act-dtype", "f32", "--isa", "scalar"},
                            ReadAll(text));
  EXPECT_EQ(json::parse(piped.out)["routing"]["tokens"], tokens) << piped.err;
}

TEST_F(Cli, InspectRoutingExplainsBadUsage) {
  const std::string text = (folder_ / "text.txt").string();
  std::ofstream(text) << "A text.";
  const std::string empty = (folder_ / "empty.txt").string();
  std::ofstream(empty) << "";
  EXPECT_EQ(Run({"inspect", "--routing"}).status, 2);
  EXPECT_EQ(Run({"inspect", "--html", "x"}).status, 2);
  EXPECT_EQ(Run({"inspect", "--routing", "--text", text, "--verify"}).status, 2);
  ExpectRefusal({"inspect", "--routing", "--text", "no-such-file"}, {"no-such-file"});
  ExpectRefusal({"inspect", "--routing", "--text", empty}, {empty, "no tokens"});
  ExpectRefusal({"inspect", "--routing", "--text", text, "--html", text}, {"the text itself"});
  ExpectRefusal({"inspect", "--routing", "--text", text, "--html", folder_.string()},
                {"--html", "folder"});
  ExpectRefusal({"inspect", "--routing", "--text", text, "--html", "/no/such/folder/x"},
                {"--html", "/no/such/folder"});
  ExpectRefusal({"inspect", "--routing", "--text", text, "--html", "/dev/full"}, {"/dev/full"});
  ExpectRefusal({"inspect", Golden("olmoe_clip"), "--routing", "--text", text}, {"tokenizer.json"});
}

// A case of kind "dispatch": two tokens sorted by their experts. `count` is the expected count of
// expert 0; the right one is 1.
void WriteDispatchCase(const std::filesystem::path& path, int count) {
  const json info = {
      {"name", "tiny"},
      {"kind", "dispatch"},
      {"config",
       {{"protocol", "local_sort"},
        {"world_size", 1},
        {"num_experts", 2},
        {"top_k", 1},
        {"hidden_size", 1},
        {"tokens_per_rank", {2}},
        {"payload", "bf16"}}},
      {"checks",
       {{{"tensor", "out.counts"}, {"mode", "exact"}},
        {{"tensor", "out.combined"}, {"mode", "close"}, {"atol", 1e-6}, {"rtol", 0}}}}};
  const std::vector<float> x{1, 2}, weights{1, 1}, gain{1, 3}, combined{3, 2};
  const std::vector<int32_t> ids{1, 0}, counts{count, 1};
  const auto view = [](const auto& values, DType dtype, const Shape& shape) {
    return TensorView{reinterpret_cast<const std::byte*>(values.data()), dtype, shape};
  };
  const std::vector<NamedTensor> tensors = {{"in.x", view(x, DType::kF32, {2, 1})},
                                            {"in.topk_ids", view(ids, DType::kI32, {2, 1})},
                                            {"in.topk_weights", view(weights, DType::kF32, {2, 1})},
                                            {"in.expert_gain", view(gain, DType::kF32, {2})},
                                            {"out.counts", view(counts, DType::kI32, {2})},
                                            {"out.combined", view(combined, DType::kF32, {2, 1})}};
  WriteSafetensors(path, tensors,
                   {{"format", "moe-golden-1"}, {"kind", "dispatch"}, {"case", info.dump()}});
}

TEST_F(Cli, ReplayComparesAndCounts) {
  const std::filesystem::path cases = folder_ / "cases";
  std::filesystem::create_directories(cases / "deeper");
  const std::string good = (cases / "a.safetensors").string();
  WriteDispatchCase(good, 1);
  const Outcome one = Run({"replay", good, "--isa", "scalar", "--threads", "1"});
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_NE(one.out.find("dispatch/tiny"), std::string::npos) << one.out;
  EXPECT_NE(one.out.find("PASS  out.c"), std::string::npos) << one.out;
  EXPECT_NE(one.out.find("1 case: 1 passed, 0 failed, 0 skipped"), std::string::npos) << one.out;

  WriteDispatchCase(cases / "deeper" / "b.safetensors", 2);
  std::ofstream(cases / "c.safetensors") << "not a case";
  const Outcome all = Run({"replay", cases.string()});
  EXPECT_EQ(all.status, 1);
  EXPECT_EQ(std::count(all.out.begin(), all.out.end(), '\n'), 4) << all.out;
  EXPECT_NE(all.out.find("FAIL  out.counts error 1, tolerance 0"), std::string::npos) << all.out;
  EXPECT_NE(all.out.find("element [0] is 1, expected 2"), std::string::npos) << all.out;
  EXPECT_NE(all.out.find("3 cases: 1 passed, 2 failed, 0 skipped"), std::string::npos) << all.out;

  const Outcome machine = Run({"replay", cases.string(), "--json"});
  EXPECT_EQ(machine.status, 1);
  const json result = json::parse(machine.out);
  EXPECT_EQ(result["passed"], 1);
  EXPECT_EQ(result["failed"], 2);
  EXPECT_EQ(result["cases"][0]["status"], "PASS");
  EXPECT_EQ(result["cases"][1]["status"], "FAIL");
  EXPECT_NE(result["cases"][1]["reason"].get<std::string>().find("not a case"), std::string::npos)
      << result["cases"][1];
  EXPECT_EQ(result["cases"][2]["checks"][0]["passed"], false);
}

TEST_F(Cli, ReplayWritesTheTensorsOfOneCase) {
  const std::string good = (folder_ / "a.safetensors").string();
  const std::string out = (folder_ / "out.safetensors").string();
  WriteDispatchCase(good, 1);
  EXPECT_EQ(Run({"replay", good, "--runner", "reference", "--output", out}).status, 0);
  const std::string bytes = ReadAll(out);
  const SafetensorsFile file =
      SafetensorsFile::Parse(out, std::as_bytes(std::span<const char>(bytes)));
  EXPECT_NE(file.Find("out.sorted_route"), nullptr);
  EXPECT_EQ(Run({"replay", good, good, "--output", out}).status, 2);
  ExpectRefusal({"replay", good, "--output", good}, {"--output", "the case itself"});
  ExpectRefusal({"replay", good, "--output", "/no/such/folder/x"}, {"--output", "/no/such/folder"});
  ExpectRefusal({"replay", good, "--output", ""}, {"--output", "empty"});
}

TEST_F(Cli, ReplayThatComparesNothingFails) {
  const std::string skipped =
      (testing::LocalGoldenDir() / "moe-layer/cases/layer/046-no-combine-bias-bf16.safetensors")
          .string();
  const Outcome one = Run({"replay", skipped, "--runner", "ascend"});
  EXPECT_EQ(one.status, 1);
  EXPECT_NE(one.out.find("SKIP  layer 0: no_combine"), std::string::npos) << one.out;
  EXPECT_NE(one.out.find("1 case: 0 passed, 0 failed, 1 skipped"), std::string::npos) << one.out;
  EXPECT_EQ(one.err, "switchyard replay: nothing was compared: the case was skipped\n");
  const Outcome two = Run({"replay", skipped, skipped, "--runner", "ascend", "--json"});
  EXPECT_EQ(two.status, 1);
  EXPECT_EQ(json::parse(two.out)["skipped"], 2);
  EXPECT_EQ(two.err, "switchyard replay: nothing was compared: all cases were skipped\n");
  const std::string good = (folder_ / "a.safetensors").string();
  WriteDispatchCase(good, 1);
  const Outcome mixed = Run({"replay", good, skipped, "--runner", "ascend"});
  EXPECT_EQ(mixed.status, 0) << mixed.err;
  EXPECT_EQ(mixed.err, "");
}

TEST_F(Cli, ReplayExplainsBadUsage) {
  EXPECT_EQ(Run({"replay"}).status, 2);
  ExpectRefusal({"replay", "no/such/case"}, {"no/such/case"});
  ExpectRefusal({"replay", folder_.string()}, {folder_.string(), ".safetensors"});
  const std::string good = (folder_ / "a.safetensors").string();
  WriteDispatchCase(good, 1);
  ExpectRefusal({"replay", good, "--runner", "fast"}, {"--runner", "fast", "aiter"});
  ExpectRefusal({"replay", good, "--a2a", "pigeon"}, {"--a2a", "pigeon", "deepep"});
}

// A prediction is arithmetic: its figures are those of tests/simulate.
TEST_F(Cli, SimulatePredictsALayout) {
  Outcome outcome =
      Run({"simulate", "--shape", "deepseek-v3:fp8_block", "--ep", "32", "--nodes", "4", "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json result = json::parse(outcome.out);
  EXPECT_EQ(result["ranks"], 32);
  EXPECT_EQ(result["dispatch_row_bytes"], 7488);
  EXPECT_EQ(result["link"]["nic_gbytes_per_s"], 25);
  EXPECT_EQ(result["exchanges"][0]["exchange"], "flat");
  EXPECT_NEAR(result["exchanges"][0]["dispatch"]["total_us"].get<double>(), 2217, 1);
  EXPECT_NEAR(result["exchanges"][1]["dispatch"]["total_us"].get<double>(), 1372, 1);
  outcome = Run({"simulate", "--shape", "deepseek-v3", "--ep", "32", "--nodes", "4"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  for (const char* word : {"hierarchical", "tokens/s", "kB", "us", "ms", "assumptions:"})
    EXPECT_NE(outcome.out.find(word), std::string::npos) << word << "\n" << outcome.out;
}

TEST_F(Cli, SimulateReadsLinkAndRoutingFiles) {
  const std::string link = (folder_ / "link.json").string();
  const std::string routing = (folder_ / "routing.json").string();
  std::ofstream(link) << R"({"name": "mine", "nic_gbytes_per_s": 50, "nic_per": "rank"})";
  const Outcome recorded = Run({"inspect", "--routing", "--json", "--text",
                                (testing::SourceDir() / "models/default/heldout.txt").string()});
  ASSERT_EQ(recorded.status, 0) << recorded.err;
  const json experts = json::parse(recorded.out)["routing"];
  // As if the model had the experts of a known shape: 8 of which each token chooses 2.
  json layer = {{"layer", 0}, {"tokens", {10, 4, 1, 1, 1, 1, 1, 1}}};
  json file = {{"routing", experts}};
  file["routing"]["tokens"] = 10;
  file["routing"]["experts"] = 8;
  file["routing"]["experts_per_token"] = 2;
  file["routing"]["layers"] = {layer};
  std::ofstream(routing) << file;
  const Outcome outcome = Run({"simulate", "--shape", "tiny-qwen3moe", "--ep", "4", "--link", link,
                               "--routing", routing, "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json result = json::parse(outcome.out);
  EXPECT_EQ(result["link"]["name"], "mine");
  EXPECT_EQ(result["link"]["nic_per"], "rank");
  EXPECT_EQ(result["routing"], routing);
  EXPECT_NEAR(result["busiest_over_mean"].get<double>(), 14.0 / 5, 1e-9);
  std::ofstream(routing) << recorded.out;
  ExpectRefusal({"simulate", "--shape", "olmoe-1b-7b", "--routing", routing},
                {routing, "recorded from a model", "8 of 64"});
}

TEST_F(Cli, SimulateSweepsAndDraws) {
  const std::string html = (folder_ / "page.html").string();
  const std::string svg = (folder_ / "plot.svg").string();
  const Outcome outcome = Run({"simulate", "--shape", "olmoe-1b-7b,qwen3-30b-a3b", "--sweep",
                               "--json", "--html", html, "--svg", svg});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  ASSERT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 2) << "one line a shape";
  const json first = json::parse(outcome.out.substr(0, outcome.out.find('\n')));
  EXPECT_EQ(first["sweep"].size(), 12u);
  EXPECT_EQ(first["sweep"][11]["ranks"], 4096);
  EXPECT_NE(ReadAll(html).find("<svg"), std::string::npos);
  EXPECT_EQ(ReadAll(svg).find("<svg"), 0u);
  EXPECT_NE(Run({"simulate", "--shape", "olmoe-1b-7b", "--sweep"}).out.find("4096"),
            std::string::npos);
}

TEST_F(Cli, SimulateExplainsBadUsage) {
  const auto refuse = [this](std::vector<std::string> more, const std::vector<std::string>& words,
                             int status = 1) {
    more.insert(more.begin(), "simulate");
    ExpectRefusal(more, words, status);
  };
  refuse({}, {"--shape"}, 2);
  refuse({"--shape", "olmoe-1b-7b", "--mode", "fast"}, {"--mode"}, 2);
  refuse({"--shape", "olmoe-1b-7b", "--ep", "-1"}, {"--ep"}, 2);
  refuse({"--shape", "olmo-1b-7b"}, {"did you mean \"olmoe-1b-7b\"", "deepseek-v3"});
  refuse({"--shape", "olmoe-1b-7b:int3"}, {"int3", "fp8_block"});
  refuse({"--shape", "olmoe-1b-7b", "--ep", "48", "--nodes", "6"}, {"48 ranks", "--redundant 32"});
  refuse({"--shape", "olmoe-1b-7b", "--ep", "8", "--nodes", "3"}, {"8 ranks", "3 nodes"});
  refuse({"--shape", "olmoe-1b-7b", "--ep", "0"}, {"--ep", "1 to 4096"});
  refuse({"--shape", "olmoe-1b-7b", "--ep", "0", "--sweep"}, {"--ep", "1 to 4096"});
  refuse({"--shape", "olmoe-1b-7b", "--ep", "8", "--nodes", "0", "--sweep"}, {"--nodes"});
  refuse({"--shape", "olmoe-1b-7b", "--dispatch-dtype", "fp4"}, {"fp4", "bf16, fp8 or int8"});
  refuse({"--shape", "olmoe-1b-7b", "--routing", "zipf:steep"}, {"--routing", "steep"});
  refuse({"--shape", "olmoe-1b-7b", "--routing", "zipf:1:x"}, {"--routing", "SEED", "\"x\""});
  refuse({"--shape", "olmoe-1b-7b", "--routing", "zipf:9"}, {"exponent", "0 to 8", "9"});
  refuse({"--shape", "olmoe-1b-7b", "--routing", "/no/such"}, {"/no/such", "cannot be read"});
  refuse({"--shape", "olmoe-1b-7b", "--link", "/no/such"}, {"/no/such", "cannot be read"});
  refuse({"--shape", "olmoe-1b-7b", "--html", "/no/such/x"}, {"--html", "/no/such"});
  refuse({"--shape", "olmoe-1b-7b", "--svg", folder_.string()}, {"--svg", "cannot be written"});
  const std::string link = (folder_ / "link.json").string();
  std::ofstream(link) << R"({"latency_ms": 1})";
  refuse({"--shape", "olmoe-1b-7b", "--link", link}, {link, "latency_ms", "latency_us"});
}

TEST_F(Cli, EnvironmentVariablesAreRead) {
  setenv("SWITCHYARD_THREADS", "zero", 1);
  ExpectRefusal({"info"}, {"SWITCHYARD_THREADS", "zero"});
  setenv("SWITCHYARD_THREADS", "1", 1);
  EXPECT_NE(Run({"config"}).out.find("SWITCHYARD_THREADS"), std::string::npos);
  unsetenv("SWITCHYARD_THREADS");
}

}  // namespace
}  // namespace switchyard
