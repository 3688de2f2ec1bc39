// One dispatch and one combine with the MPI calls that the engine makes, for SimGrid's SMPI, which
// runs them on a cluster that is only described (check_smpi starts it).
//
//   smpi_exchange SCHEME RANKS_PER_NODE TOKENS EXPERTS TOP_K DISPATCH_ROW COMBINE_ROW
//
// SCHEME flat: counts by MPI_Alltoall, rows by MPI_Alltoallv, a row once to every rank that has an
// expert of the token. SCHEME hierarchical: the same between ranks of the same place on each node,
// a row once to every node, and from there inside the node. The combine goes the other way and
// knows its counts. Routing is drawn uniformly, from another seed on each rank. Prints the time of
// the slowest rank in microseconds: dispatch,combine.
//
// Rows have no content that anybody reads, so all ranks share one buffer (SMPI_SHARED_MALLOC): 128
// ranks fit into the memory of a laptop.
#include <smpi/mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace {

using Counts = std::vector<int>;

struct Layout {
  int ranks_per_node = 1, tokens = 0, experts = 0, top_k = 0, dispatch_row = 0, combine_row = 0;
};

// The choices of this rank's tokens, as sets of ranks.
std::vector<std::set<int>> DrawTargets(const Layout& layout, int rank, int num_ranks) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  const int per_rank = layout.experts / num_ranks;
  std::vector<std::set<int>> targets(static_cast<size_t>(layout.tokens));
  for (std::set<int>& token : targets) {
    std::set<int> experts;
    while (static_cast<int>(experts.size()) < layout.top_k)
      experts.insert(static_cast<int>(random() % static_cast<unsigned>(layout.experts)));
    for (int expert : experts) token.insert(expert / per_rank);
  }
  return targets;
}

// Tokens that go to each of `groups` groups of `size` ranks.
Counts CountGroups(const std::vector<std::set<int>>& targets, int groups, int size) {
  Counts counts(static_cast<size_t>(groups), 0);
  for (const std::set<int>& token : targets) {
    std::set<int> reached;
    for (int rank : token) reached.insert(rank / size);
    for (int group : reached) ++counts[static_cast<size_t>(group)];
  }
  return counts;
}

// A communicator with its exchanges; all of them count rows.
class Exchange {
 public:
  Exchange(MPI_Comm comm, char* send, char* receive)
      : comm_(comm), send_(send), receive_(receive) {}

  Counts ExchangeCounts(const Counts& send) const {
    Counts receive(send.size());
    MPI_Alltoall(send.data(), 1, MPI_INT, receive.data(), 1, MPI_INT, comm_);
    return receive;
  }

  // Displacements are 0: nobody reads the rows.
  void ExchangeRows(const Counts& send, const Counts& receive, int row_bytes) const {
    MPI_Datatype row;
    MPI_Type_contiguous(row_bytes, MPI_BYTE, &row);
    MPI_Type_commit(&row);
    const Counts zeros(send.size(), 0);
    MPI_Alltoallv(send_, send.data(), zeros.data(), row, receive_, receive.data(), zeros.data(),
                  row, comm_);
    MPI_Type_free(&row);
  }

 private:
  MPI_Comm comm_;
  char *send_, *receive_;
};

// One leg: what this rank sends and what it then gets.
struct Leg {
  Exchange exchange;
  Counts send, receive;

  void Dispatch(int row_bytes) {
    receive = exchange.ExchangeCounts(send);
    exchange.ExchangeRows(send, receive, row_bytes);
  }
  void Combine(int row_bytes) const { exchange.ExchangeRows(receive, send, row_bytes); }
};

// What a rank forwards to each rank of its node: the rows that it received, in the proportions in
// which uniform routing reaches the ranks of a node that is reached.
Counts ForwardCounts(const std::vector<std::set<int>>& targets, const Counts& to_nodes,
                     const Counts& received, int ranks_per_node) {
  double rows_to_ranks = 0;
  for (const std::set<int>& token : targets) rows_to_ranks += static_cast<double>(token.size());
  const double rows_to_nodes = std::accumulate(to_nodes.begin(), to_nodes.end(), 0.0);
  const double arrived = std::accumulate(received.begin(), received.end(), 0.0);
  const double each =
      rows_to_nodes == 0 ? 0 : arrived * rows_to_ranks / rows_to_nodes / ranks_per_node;
  return Counts(static_cast<size_t>(ranks_per_node), static_cast<int>(each + 0.5));
}

// Time of the slowest rank.
template <typename Body>
double SlowestUs(const Body& body) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  body();
  const double own = (MPI_Wtime() - start) * 1e6;
  double slowest = 0;
  MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return slowest;
}

void Run(const std::string& scheme, const Layout& layout, char* send, char* receive) {
  int rank = 0, num_ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
  const int p = layout.ranks_per_node;
  const std::vector<std::set<int>> targets = DrawTargets(layout, rank, num_ranks);
  MPI_Comm node, rail;
  MPI_Comm_split(MPI_COMM_WORLD, rank / p, rank, &node);
  MPI_Comm_split(MPI_COMM_WORLD, rank % p, rank, &rail);

  std::vector<Leg> legs;
  if (scheme == "flat") {
    legs.push_back({{MPI_COMM_WORLD, send, receive}, CountGroups(targets, num_ranks, 1), {}});
  } else {
    legs.push_back({{rail, send, receive}, CountGroups(targets, num_ranks / p, p), {}});
    legs.push_back({{node, send, receive}, {}, {}});
  }
  const double dispatch = SlowestUs([&] {
    legs[0].Dispatch(layout.dispatch_row);
    if (legs.size() == 1) return;
    legs[1].send = ForwardCounts(targets, legs[0].send, legs[0].receive, p);
    legs[1].Dispatch(layout.dispatch_row);
  });
  // Before the rows leave the node, those of a token are added up: the first leg has one a node.
  const double combine = SlowestUs([&] {
    for (size_t i = legs.size(); i-- > 0;) legs[i].Combine(layout.combine_row);
  });
  if (rank == 0) std::printf("%.2f,%.2f\n", dispatch, combine);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const std::string scheme = argc == 8 ? argv[1] : "";
  if (scheme != "flat" && scheme != "hierarchical") {
    std::fprintf(stderr,
                 "smpi_exchange flat|hierarchical RANKS_PER_NODE TOKENS EXPERTS TOP_K DISPATCH_ROW "
                 "COMBINE_ROW\n");
    MPI_Finalize();
    return 2;
  }
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  const Layout layout{number(2), number(3), number(4), number(5), number(6), number(7)};
  int num_ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
  // The most that one rank can receive in one leg: all tokens of all ranks.
  const size_t bytes = static_cast<size_t>(layout.tokens) * static_cast<size_t>(num_ranks) *
                       static_cast<size_t>(std::max(layout.dispatch_row, layout.combine_row));
  char* send = static_cast<char*>(SMPI_SHARED_MALLOC(std::max<size_t>(bytes, 64)));
  char* receive = static_cast<char*>(SMPI_SHARED_MALLOC(std::max<size_t>(bytes, 64)));
  Run(scheme, layout, send, receive);
  SMPI_SHARED_FREE(send);
  SMPI_SHARED_FREE(receive);
  MPI_Finalize();
  return 0;
}
