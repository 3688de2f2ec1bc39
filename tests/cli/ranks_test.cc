// The program on several ranks, as mpirun starts it: one answer whatever the exchange, and what
// happens when ranks die, stop, or do not fit together.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "testing/goldens.h"

namespace switchyard {
namespace {

using Clock = std::chrono::steady_clock;

struct Outcome {
  int status = -1;
  double seconds = 0;
  std::string out, err;
};

std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

const std::vector<std::string> kBackends = {"none", "deepep", "mooncake",
                                            "nixl", "mori",   "ascend_fuseep"};

// A chat of many lines: long enough to be hit in the middle. Not every mpirun passes on that the
// input has ended.
const std::string kLines = "(yes 'The sea' | head -n 15; echo /exit) | ";
const std::string kLongText = "run --raw -n 300 --temp 0 --threads 1 ";

class Ranks : public ::testing::Test {
 protected:
  Ranks()
      : folder_(std::filesystem::temp_directory_path() /
                ("switchyard-ranks-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~Ranks() override { std::filesystem::remove_all(folder_); }

  // Starts a shell command in a process group of its own.
  pid_t Start(const std::string& command) {
    const std::string whole = fmt::format("({}) >{}/out 2>{}/err </dev/null", command,
                                          folder_.string(), folder_.string());
    const pid_t pid = fork();
    if (pid != 0) return pid;
    setenv("SWITCHYARD_TEST_TAG", folder_.c_str(), 1);
    execl("/bin/sh", "sh", "-c", whole.c_str(), nullptr);
    _exit(127);
  }
  Outcome Wait(pid_t pid, Clock::time_point since) {
    int status = 0;
    waitpid(pid, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status),
            std::chrono::duration<double>(Clock::now() - since).count(), ReadAll(folder_ / "out"),
            ReadAll(folder_ / "err")};
  }
  Outcome Run(const std::string& command) {
    const auto start = Clock::now();
    return Wait(Start(command), start);
  }
  static std::string Mpirun(size_t ranks, const std::string& arguments,
                            const std::string& launcher = "") {
    return fmt::format("timeout 100 {} {} -n {} {} {}", SY_MPIRUN, launcher, ranks, SY_PROGRAM,
                       arguments);
  }

  // What `logits` writes about 70 tokens.
  std::string Logits(const std::string& command, const std::string& more) {
    const auto file = folder_ / "logits.safetensors";
    std::filesystem::remove(file);
    std::string ids;
    for (int i = 0; i < 70; ++i) ids += fmt::format("{}{}", i == 0 ? "" : ",", 3 + 7 * i % 200);
    const Outcome outcome = Run(fmt::format("{} logits {} --ids {} --threads 1 --output {}",
                                            command, more, ids, file.string()));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return ReadAll(file);
  }

  // The process of a rank that this test has started; 0 if there is none.
  pid_t Find(size_t rank) const {
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const std::string environment = ReadAll(entry.path() / "environ");
      std::error_code gone;
      const auto program = std::filesystem::read_symlink(entry.path() / "exe", gone);
      const bool mine =
          environment.find("SWITCHYARD_TEST_TAG=" + folder_.string()) != std::string::npos &&
          environment.find(fmt::format("OMPI_COMM_WORLD_RANK={}", rank) + std::string(1, '\0')) !=
              std::string::npos;
      if (mine && !gone && program.filename() == "switchyard") return std::stoi(name);
    }
    return 0;
  }

  // Runs on four ranks and sends a signal to one of them once it has printed some text.
  Outcome RunAndHit(int signal, size_t rank, const std::string& arguments,
                    const std::string& launcher = "") {
    std::filesystem::remove(folder_ / "out");
    const pid_t job = Start(kLines + Mpirun(4, arguments, launcher));
    const auto start = Clock::now();
    pid_t victim = 0;
    while (Clock::now() - start < std::chrono::seconds(60)) {
      if (std::filesystem::exists(folder_ / "out") &&
          std::filesystem::file_size(folder_ / "out") > 1000) {
        victim = Find(rank);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_NE(victim, 0) << "rank " << rank << " was not found while it ran";
    if (victim != 0) kill(victim, signal);
    return Wait(job, Clock::now());
  }

  static std::string Golden(const std::string& name) {
    return (testing::LocalGoldenDir() / name / "checkpoint").string();
  }

  std::filesystem::path folder_;
};

const std::string kText = "run --raw -p 'The sea' -n 24 --temp 0 --threads 1 ";

TEST_F(Ranks, TheSameTextWithEveryBackend) {
  const std::string expected = Run(SY_PROGRAM " " + kText).out;
  ASSERT_GT(expected.size(), 20u);
  for (size_t ranks : {1u, 2u, 4u}) {
    for (const std::string& a2a : kBackends) {
      for (const char* attention : {"", "--dp-attention"}) {
        const Outcome outcome =
            Run(Mpirun(ranks, fmt::format("{} --moe-a2a {} {}", kText, a2a, attention)));
        EXPECT_EQ(outcome.out, expected) << ranks << " " << a2a << " " << attention;
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_EQ(outcome.err, "") << ranks << " " << a2a;
      }
    }
  }
}

TEST_F(Ranks, TheSameTextInEveryLayout) {
  const std::string expected = Run(SY_PROGRAM " " + kText).out;
  for (const char* layout :
       {"--moe-runner ascend", "--moe-runner ascend --moe-a2a deepep",
        "--moe-runner ascend --moe-a2a deepep --deepep-mode low_latency", "--moe-ep-size 2",
        "--moe-ep-size 1", "--moe-ep-size 2 --moe-dp-size 2", "--moe-ep-size 2 --dp-attention",
        "--ep-num-redundant-experts 4 --moe-a2a mori",
        "--ep-num-redundant-experts 8 --ep-dispatch-algorithm dynamic", "--ep-summed-combine",
        "--ep-push-rows 0 --moe-a2a deepep --dp-attention", "--chunk 5 --moe-a2a mori",
        ("--enable-eplb --eplb-rebalance-num-iterations 5 --eplb-rebalance-layers-per-chunk 1 "
         "--ep-num-redundant-experts 8 --moe-a2a deepep")}) {
    const Outcome outcome = Run(Mpirun(4, kText + layout));
    EXPECT_EQ(outcome.out, expected) << layout << "\n" << outcome.err;
    EXPECT_EQ(outcome.status, 0) << layout;
  }
  // Pretended nodes of two.
  for (const char* a2a : {"none", "deepep", "mori"}) {
    const Outcome outcome =
        Run("SWITCHYARD_FAKE_NODE_SIZE=2 " + Mpirun(4, fmt::format("{} --moe-a2a {}", kText, a2a)));
    EXPECT_EQ(outcome.out, expected) << a2a << outcome.err;
  }
}

TEST_F(Ranks, LogitsAreTheSameBits) {
  const auto logits = [&](const std::string& command) {
    return Logits(command, "--hidden 0,1 --routing");
  };
  const std::string expected = logits(SY_PROGRAM);
  ASSERT_GT(expected.size(), 70u * 4096u * 4u);
  for (size_t ranks : {2u, 4u}) {
    for (const std::string& a2a : kBackends) {
      for (const char* more : {"", " --dp-attention", " --chunk 16"}) {
        // Settings by environment, so that they come before the verb.
        const bool dp = std::string_view(more) == " --dp-attention";
        const std::string environment =
            fmt::format("SWITCHYARD_MOE_A2A={} SWITCHYARD_DP_ATTENTION={} SWITCHYARD_CHUNK={}", a2a,
                        dp ? 1 : 0, std::string_view(more) == " --chunk 16" ? 16 : 512);
        EXPECT_TRUE(logits(environment + " " + Mpirun(ranks, "")) == expected)
            << ranks << " " << environment;
      }
    }
  }
}

// Every rank encodes all rows of the cache and attends with its own heads.
TEST_F(Ranks, LogitsAreTheSameBitsInEveryKvType) {
  const std::string latent = (testing::LocalGoldenDir() / "deepseek_v3" / "checkpoint").string();
  for (const std::string& model : {std::string(), latent}) {
    std::vector<std::string> seen;
    for (const char* kv_dtype : {"f32", "bf16", "f16", "fp8", "int8"}) {
      const std::string more = model + " --kv-dtype " + kv_dtype;
      const std::string expected = Logits(SY_PROGRAM, more);
      EXPECT_EQ(std::count(seen.begin(), seen.end(), expected), 0) << more << " has no effect";
      seen.push_back(expected);
      for (size_t ranks : {2u, 4u})
        EXPECT_TRUE(Logits(Mpirun(ranks, ""), more) == expected) << ranks << more;
    }
  }
}

TEST_F(Ranks, ExpertsMoveInAModelWithADenseLayer) {
  SY_SKIP_WITHOUT_GOLDENS();
  const std::string model = (*testing::GoldenDir() / "models/qwen3_moe_nonorm/checkpoint").string();
  const auto logits = [&](const std::string& command, const std::string& more) {
    const auto file = folder_ / "logits.safetensors";
    std::filesystem::remove(file);
    const Outcome outcome =
        Run(fmt::format("{} logits {} --ids 5,6,7,8,9,10 --chunk 1 --threads 1 "
                        "{} --output {}",
                        command, model, more, file.string()));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return ReadAll(file);
  };
  const std::string expected = logits(SY_PROGRAM, "");
  EXPECT_TRUE(logits(Mpirun(2, ""),
                     "--ep-num-redundant-experts 1 --enable-eplb "
                     "--eplb-rebalance-num-iterations 2") == expected);
}

TEST_F(Ranks, ChatReadsStandardInputOnRankZero) {
  const std::string chat = " run --raw -n 8 --temp 0 --threads 1";
  // mpirun of Open MPI 5.0.11 does not tell rank 0 that its input has ended (openpmix #4024).
  const bool ends = Run(fmt::format("timeout 5 {} -n 1 cat </dev/null", SY_MPIRUN)).status == 0;
  const std::string input =
      fmt::format("printf 'The sea\\nOnce upon\\n{}' | ", ends ? "" : "/exit\\n");
  const auto run = [&](const std::string& command) {
    std::ofstream(folder_ / "script") << input << command << "\n";
    return Run("sh " + (folder_ / "script").string());
  };
  const Outcome expected = run(SY_PROGRAM + chat);
  ASSERT_GT(expected.out.size(), 20u);
  const Outcome outcome = run(Mpirun(2, chat));
  EXPECT_EQ(outcome.out, expected.out);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
}

TEST_F(Ranks, EvalBenchAndPlacement) {
  std::ofstream(folder_ / "text") << std::string(
      "It was the best of times, it was the worst of times, it was the age of wisdom. ");
  const std::string eval = " eval --json --threads 1 --text " + (folder_ / "text").string();
  const auto perplexity = [&](const std::string& command) {
    return nlohmann::json::parse(Run(command).out)["perplexity"].get<double>();
  };
  const double expected = perplexity(SY_PROGRAM + eval);
  EXPECT_EQ(perplexity(Mpirun(2, eval)), expected);
  EXPECT_EQ(perplexity(Mpirun(4, eval + " --moe-a2a mooncake")), expected);
  const Outcome bench = Run(
      Mpirun(2, "bench -p 32 -n 4 -b 3 -r 1 --json --threads 1 --moe-a2a deepep --dp-attention"));
  EXPECT_GT(nlohmann::json::parse(bench.out)["tg_tps"].get<double>(), 0) << bench.err;
  const Outcome placement = Run(Mpirun(4, "inspect --placement --json"));
  const nlohmann::json lines = nlohmann::json::parse(placement.out);
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[3]["experts"], "6-7");
  EXPECT_EQ(lines[3]["local_share"], 1.0);
}

// --- Faults
// ---------------------------------------------------------------------------------------

TEST_F(Ranks, ALostRankEndsTheJobWithAnErrorThatSaysWhere) {
  for (int signal : {SIGKILL, SIGSTOP}) {
    for (const char* a2a : {"none", "deepep", "mori", "ascend_fuseep"}) {
      const Outcome outcome = RunAndHit(signal, 2, fmt::format("{} --moe-a2a {}", kLongText, a2a));
      EXPECT_NE(outcome.status, 0) << a2a;
      EXPECT_LT(outcome.seconds, 10) << a2a;
      for (const char* word : {"switchyard: unavailable: ", "rank 0", "layer ", "step ", "rank 2"})
        EXPECT_NE(outcome.err.find(word), std::string::npos) << a2a << ": " << word << "\n"
                                                             << outcome.err;
    }
  }
}

TEST_F(Ranks, ElasticBackendsGoOnWithoutIt) {
  if (std::string_view(SY_MPIRUN_RECOVERY).empty())
    GTEST_SKIP() << "this mpirun ends the job when a rank dies";
  const std::string whole = Run(kLines + SY_PROGRAM + " " + kLongText).out;
  for (int signal : {SIGKILL, SIGSTOP}) {
    for (const char* a2a : {"mooncake", "nixl"}) {
      // Copies of all experts on other ranks: not a word changes.
      Outcome outcome = RunAndHit(
          signal, 2, fmt::format("{} --moe-a2a {} --ep-num-redundant-experts 8", kLongText, a2a),
          SY_MPIRUN_RECOVERY);
      EXPECT_EQ(outcome.status, 0) << a2a << outcome.err;
      EXPECT_EQ(outcome.out, whole) << a2a;
      EXPECT_LT(outcome.seconds, 60);
      EXPECT_NE(outcome.err.find("goes on without rank 2"), std::string::npos) << outcome.err;
      // Without copies its experts add nothing, and the answer is finished all the same.
      outcome =
          RunAndHit(signal, 3, fmt::format("{} --moe-a2a {}", kLongText, a2a), SY_MPIRUN_RECOVERY);
      EXPECT_EQ(outcome.status, 0) << a2a << outcome.err;
      EXPECT_NE(outcome.err.find("goes on without rank 3"), std::string::npos) << outcome.err;
    }
  }
}

TEST_F(Ranks, InfoSaysWhetherRanksMayBeLost) {
  const auto mpi = [&](const std::string& launcher) {
    return nlohmann::json::parse(Run(Mpirun(2, "info --json", launcher)).out)["build"]["mpi"]
        .get<std::string>();
  };
  const std::string plain = mpi("");
  EXPECT_NE(plain.find("2 ranks; the launcher ends the job"), std::string::npos) << plain;
  const std::string recovery = SY_MPIRUN_RECOVERY;
  if (recovery.empty()) return;
  EXPECT_NE(plain.find("(mpirun " + recovery + " would not)"), std::string::npos) << plain;
  EXPECT_NE(mpi(recovery).find("lets the others go on"), std::string::npos) << mpi(recovery);
}

TEST_F(Ranks, TheLossOfRankZeroEndsTheOthers) {
  const Outcome outcome = RunAndHit(SIGKILL, 0, kLongText + "--moe-a2a deepep");
  EXPECT_NE(outcome.status, 0);
  EXPECT_LT(outcome.seconds, 10);
  EXPECT_NE(outcome.err.find("rank 0 has died"), std::string::npos) << outcome.err;
}

// --- Bad input
// ------------------------------------------------------------------------------------

TEST_F(Ranks, WhatCannotBeIsRefusedOnAllRanksWithOneMessage) {
  struct Case {
    std::string command;
    std::vector<std::string> words;
  };
  const std::string two = fmt::format("timeout 100 {} ", SY_MPIRUN);
  const std::string program = SY_PROGRAM " " + kText;
  const std::vector<Case> cases = {
      {Mpirun(3, kText), {"8 experts", "3 ranks", "--ep-num-redundant-experts 1"}},
      {Mpirun(2, kText + "--tp-size 3"), {"tp", "3", "2"}},
      {Mpirun(2, kText + "--moe-a2a deepep --moe-ep-size 1"), {"--moe-ep-size must be 2"}},
      {Mpirun(2, kText + "--moe-a2a deepep --moe-runner reference"),
       {"deepep", "reference", "(deepep, aiter)"}},
      {Mpirun(2, kText + "--moe-a2a mori --moe-runner ascend"), {"expanded"}},
      {Mpirun(2, kText + "--moe-a2a ascend_fuseep --moe-runner reference"), {"ascend_fuseep"}},
      {Mpirun(2, kText + "--moe-a2a ascend_fuseep --moe-fused-buffer-mb 1 "
                         "--num-max-dispatch-tokens-per-rank 1024"),
       {"moe-fused-buffer-mb", "MB"}},
      {Mpirun(2, kText + "--num-max-dispatch-tokens-per-rank 1025 --moe-a2a deepep"),
       {"num-max-dispatch-tokens-per-rank", "1024", "1025"}},
      {"SWITCHYARD_FAKE_NODE_SIZE=1 " + Mpirun(2, kText + "--moe-a2a ascend_fuseep"), {"node"}},
      {two + fmt::format("-n 1 {} : -n 1 {} --chunk 100", program, program),
       {"rank 1", "chunk 100", "chunk 512"}},
      {two + fmt::format("-n 1 {} : -n 1 {} run /nowhere --raw -p 'The sea' -n 24 --temp 0 "
                         "--threads 1",
                         program, SY_PROGRAM),
       {"rank 1", "/nowhere"}},
      {two + fmt::format("-n 1 {} : -n 1 {} --isa scalar", program, program),
       {"rank 1", "instruction set"}},
      {Mpirun(2, "bench -p 16 -n 2 -r 1 -b 129 --moe-a2a mooncake"),
       {"129 tokens", "num-max-dispatch-tokens-per-rank"}},
      {two + fmt::format("-n 1 {} : -n 1 {} info", program, SY_PROGRAM), {"rank 1 has ended"}},
      {SY_PROGRAM " " + kText + "--moe-a2a deepep", {"--moe-a2a deepep", "mpirun"}},
      {two + fmt::format("-n 1 {} : -n 1 {} run {} --raw -p 'The sea' -n 24 --temp 0 --threads 1",
                         program, SY_PROGRAM, Golden("olmoe_clip")),
       {"rank 1 has another model"}},
  };
  for (const Case& test : cases) {
    const Outcome outcome = Run(test.command);
    EXPECT_EQ(outcome.status, 1) << test.command << "\n" << outcome.err;
    EXPECT_EQ(outcome.out, "") << test.command;
    EXPECT_LT(outcome.seconds, 20) << test.command;
    for (const std::string& word : test.words)
      EXPECT_NE(outcome.err.find(word), std::string::npos) << test.command << "\n"
                                                           << word << "\n"
                                                           << outcome.err;
    // One rank speaks.
    const size_t first = outcome.err.find("switchyard: ");
    EXPECT_NE(first, std::string::npos);
    EXPECT_EQ(outcome.err.find("switchyard: ", first + 1), std::string::npos) << outcome.err;
  }
}

}  // namespace
}  // namespace switchyard
