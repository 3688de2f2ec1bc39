#include "ranks.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "common.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "switchyard/parallel/run_ranks.h"
#if SWITCHYARD_HAS_MPI
#include "switchyard/parallel_mpi/mpi_session.h"
#endif

namespace switchyard::cli {
namespace {

ProcessGroup* g_world = nullptr;

constexpr std::chrono::seconds kStartLimit{60};

// Set by the launchers of Open MPI, MPICH and Intel MPI.
bool StartedByMpirun() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

bool IsElastic(const std::string& a2a) { return a2a == "mooncake" || a2a == "nixl"; }

// Whether each rank has tokens of its own.
bool OwnsTokens(const Settings& settings) {
  return settings.GetFlag("dp-attention") || IsElastic(settings.Get("moe-a2a"));
}

ParallelConfig MakeConfig(const Settings& settings, size_t ranks) {
  ParallelConfig config;
  config.tp_size = settings.GetCount("tp-size", ranks);
  config.moe_dp_size = settings.GetCount("moe-dp-size");
  const std::string& a2a = settings.Get("moe-a2a");
  config.dp_attention = OwnsTokens(settings);
  // The ascend runner's own dispatcher has all experts on every rank, and splits them.
  const bool splits = settings.Get("moe-runner") == "ascend" && a2a == "none";
  const size_t rest = std::max<size_t>(1, config.tp_size / std::max<size_t>(1, config.moe_dp_size));
  config.moe_ep_size = settings.GetCount("moe-ep-size", splits ? 1 : rest);
  config.Check(ranks);
  return config;
}

// Everything that changes results or messages between ranks.
std::string Fingerprint(const Settings& settings) {
  // Instruction sets sum in different orders.
  std::string text = fmt::format("instruction set {} (--isa)", GetCpuInfo().target_chosen);
  for (const SettingSpec& spec : AllSettings()) {
    if (spec.name == "log-level" || spec.name == "threads" || spec.name == "isa") continue;
    text += fmt::format(", {} {}", spec.name, settings.Get(spec.name));
  }
  return text;
}

// How the launcher is told to leave the others alone when a rank dies, and what it then sets in the
// environment of ranks; nothing for an MPI that is not known to do so.
struct Recovery {
  std::string_view option;
  const char* variable = nullptr;
};

Recovery LauncherRecovery() {
#if SWITCHYARD_HAS_MPI
  constexpr std::string_view kName = "Open MPI v";
  const std::string_view version = MpiLibraryVersion();
  if (version.starts_with(kName)) {
    if (std::strtoul(version.data() + kName.size(), nullptr, 10) < 5)
      return {"--enable-recovery", "OMPI_MCA_orte_enable_recovery"};
    // --enable-recovery does the same and cannot be seen from here.
    return {"--with-ft ulfm", "OMPI_MCA_mpi_ft_enable"};
  }
#endif
  return {};
}

bool LauncherRecovers() {
  const Recovery recovery = LauncherRecovery();
  const char* value = recovery.variable == nullptr ? nullptr : std::getenv(recovery.variable);
  return value != nullptr && std::string_view(value) != "0" && std::string_view(value) != "false";
}

// Ends a message that says that the launcher ends the job.
std::string RecoveryHint() {
  const std::string_view option = LauncherRecovery().option;
  return option.empty() ? "" : fmt::format(" (mpirun {} would not)", option);
}

moe::ExpertParallelOptions MakeOptions(const Settings& settings, const ParallelConfig& config,
                                       size_t pass_tokens) {
  moe::ExpertParallelOptions options = ExchangeOptions(settings);
  options.max_tokens_per_rank =
      config.dp_attention ? pass_tokens : (pass_tokens + config.tp_size - 1) / config.tp_size;
  options.num_max_dispatch_tokens_per_rank = settings.GetCount("num-max-dispatch-tokens-per-rank");
  return options;
}

}  // namespace

ProcessGroup* World() { return g_world; }
void SetWorld(ProcessGroup* world) { g_world = world; }
HostPlace PlaceOnHost() {
  if (g_world == nullptr) return {};
  // The launcher knows; SWITCHYARD_FAKE_NODE_SIZE makes up nodes.
  const char* rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
  const char* size = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (rank != nullptr && size != nullptr)
    return {std::strtoul(rank, nullptr, 10), std::max(1ul, std::strtoul(size, nullptr, 10))};
  const std::span<const size_t> peers = g_world->node_peers();
  const auto mine = std::find(peers.begin(), peers.end(), g_world->rank());
  return {static_cast<size_t>(mine - peers.begin()), peers.size()};
}

bool IsFirstRank() { return g_world == nullptr || g_world->rank() == 0; }

moe::ExpertParallelOptions ExchangeOptions(const Settings& settings) {
  moe::ExpertParallelOptions options;
  options.tokens_are_replicated = !OwnsTokens(settings);
  options.timeout = std::chrono::milliseconds(settings.GetCount("ep-timeout-ms"));
  options.deepep_mode = moe::ParseDeepepMode(settings.Get("deepep-mode"));
  options.deterministic = !settings.GetFlag("ep-summed-combine");
  options.push_rows = settings.GetCount("ep-push-rows", options.push_rows);
  options.hierarchy = moe::ParseHierarchy(settings.Get("ep-hierarchical"));
  // Unless the user names a size here, the fallbacks of FuseEP say where it comes from.
  if (settings.Source("moe-fused-buffer-mb").starts_with("--"))
    options.fused_buffer_mb = settings.GetCount("moe-fused-buffer-mb");
  options.fuseep_mode = static_cast<int>(std::stoul(settings.Get("fuseep-mode")));
  return options;
}

std::string DescribeMpi() {
#if SWITCHYARD_HAS_MPI
  std::string version(MpiLibraryVersion());
  version = version.substr(0, version.find(','));
  if (g_world == nullptr)
    return fmt::format("{}; this is one process, not started by mpirun", version);
  return fmt::format("{}; {} ranks; the launcher {}", version, g_world->size(),
                     LauncherRecovers() ? "lets the others go on when one dies"
                                        : "ends the job when one dies" + RecoveryHint());
#else
  return "none (SWITCHYARD_WITH_MPI)";
#endif
}

std::unique_ptr<ModelRanks> ModelRanks::Make(const Settings& settings, size_t max_sequences) {
  const bool alone = g_world == nullptr || g_world->size() == 1;
  if (alone && settings.Get("moe-a2a") == "none") {
    MakeConfig(settings, 1);
    return nullptr;
  }
  if (g_world == nullptr) {
    throw Error(ErrorCode::kFailedPrecondition,
                fmt::format("--moe-a2a {} exchanges rows between ranks: start them with mpirun -n "
                            "RANKS switchyard …",
                            settings.Get("moe-a2a")));
  }
  const ParallelConfig config = MakeConfig(settings, g_world->size());
  const Deadline deadline = Deadline::After(kStartLimit, "start");
  std::unique_ptr<ModelRanks> ranks(new ModelRanks);
  // A pass has a chunk of prompt tokens and one token of every other sequence.
  ranks->max_pass_tokens_ = std::max<size_t>(settings.GetCount("chunk"), 64) + max_sequences;
  ranks->watch_ = std::make_unique<PeerWatch>(*g_world, deadline);
  ranks->groups_ = std::make_unique<ParallelGroups>(
      MakeGroups(*g_world, config, Fingerprint(settings), deadline));
  ranks->ep_ = std::make_unique<moe::ExpertParallel>(
      *ranks->groups_, MakeOptions(settings, config, ranks->max_pass_tokens_));
  ranks->Watch();
  if (IsElastic(settings.Get("moe-a2a")) && !alone && !LauncherRecovers()) {
    Log(LogLevel::kInfo, "the launcher ends the job when a rank dies" + RecoveryHint());
  }
  return ranks;
}

void ModelRanks::Watch() {
  ProcessGroup& moe_ep = groups_->moe_ep();
  ep_->SetIsDead([this](size_t rank) { return IsDead(rank); });
  ep_->SetOnRankLost([this, &moe_ep](size_t rank, std::string_view why) {
    const size_t world_rank = moe_ep.WorldRank(rank);
    Log(LogLevel::kWarning, fmt::format("goes on without rank {} and its experts ({}): {}",
                                        world_rank, watch_->Describe(world_rank), why));
    // It must not write into our memory if it comes back.
    watch_->Fence(world_rank);
    g_world->MarkLost(world_rank);
  });
}

ModelRanks::~ModelRanks() {
  // Ranks that are gone would be waited for.
  for (size_t rank = 0; g_world != nullptr && rank < g_world->size(); ++rank) {
    if (watch_ == nullptr || !watch_->IsDead(rank)) continue;
    watch_->Fence(rank);
    g_world->MarkLost(rank);
  }
}

void OnAllRanks(const std::function<void()>& body) {
  if (g_world == nullptr || g_world->size() == 1) return body();
  RunTogether(*g_world, Deadline::Never("start"), body);
}

namespace {

std::atomic<bool> g_terminated{false};

#if SWITCHYARD_HAS_MPI
// mpirun ends the other ranks when one dies, and gives them two seconds: enough to find out which,
// and to say so.
void OnTerminate(int) {
  g_terminated.store(true);
  alarm(3);
}
void OnTooLate(int) { _exit(128 + SIGTERM); }

void CatchTerminate() {
  struct sigaction action = {};
  action.sa_handler = &OnTerminate;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  action.sa_handler = &OnTooLate;
  sigaction(SIGALRM, &action, nullptr);
}
#endif

}  // namespace

bool ModelRanks::IsDead(size_t rank) {
  if (g_terminated.load() && !watch_->IsDead(rank))
    throw Error(ErrorCode::kCancelled, "the job is being ended (SIGTERM)");
  return watch_->IsDead(rank);
}

int RunOnRanks(int argc, char** argv, const std::function<int()>& body) {
  if (!StartedByMpirun()) return body();
#if SWITCHYARD_HAS_MPI
  CatchTerminate();
  int status = 1;
  std::string_view kind = "internal error";
  const int failed = RunMpi(
      &argc, &argv,
      [&](ProcessGroup& world) {
        SetWorld(&world);
        try {
          status = body();
        } catch (const FollowerDone&) {
          status = 0;
        } catch (const Error& error) {
          kind = ErrorCodeName(error.code());
          throw;
        }
        SetWorld(nullptr);
      },
      [&](size_t rank, std::string_view message) {
        // One rank speaks for all, unless it is the one that is gone.
        const bool first_is_gone = message.find("rank 0 has died") != std::string_view::npos;
        if (rank == 0 || (first_is_gone && rank == 1))
          fmt::print(stderr, "switchyard: {}: {}\n", kind, Printable(message));
      });
  return failed != 0 ? failed : status;
#else
  static_cast<void>(argc);
  static_cast<void>(argv);
  throw Error(ErrorCode::kUnsupported,
              "this build has no MPI and cannot be started with mpirun: install libopenmpi-dev and "
              "configure with -DSWITCHYARD_WITH_MPI=ON");
#endif
}

}  // namespace switchyard::cli
