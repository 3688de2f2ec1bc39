// The program, run as its users run it.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace switchyard {

struct Outcome {
  int status = -1;  // 1000 and more: the number of a signal
  std::string out, err;
};

inline std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A folder of its own, in which output and errors of the program lie too.
class ProgramTest : public ::testing::Test {
 protected:
  ProgramTest()
      : folder_(std::filesystem::temp_directory_path() /
                ("switchyard-cli-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~ProgramTest() override { std::filesystem::remove_all(folder_); }

  // Starts the program with output and errors going to files; `input` is its standard input.
  pid_t Start(const std::vector<std::string>& arguments, const std::string& input = "") {
    std::ofstream(folder_ / "in") << input;
    const pid_t pid = fork();
    if (pid != 0) return pid;
    const bool good = std::freopen((folder_ / "in").c_str(), "r", stdin) != nullptr &&
                      std::freopen((folder_ / "out").c_str(), "w", stdout) != nullptr &&
                      std::freopen((folder_ / "err").c_str(), "w", stderr) != nullptr;
    if (!good) _exit(126);
    std::vector<char*> argv = {const_cast<char*>(SY_PROGRAM)};
    for (const std::string& argument : arguments)
      argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    execv(SY_PROGRAM, argv.data());
    _exit(127);
  }
  Outcome Wait(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status),
            ReadAll(folder_ / "out"), ReadAll(folder_ / "err")};
  }
  Outcome Run(const std::vector<std::string>& arguments, const std::string& input = "") {
    return Wait(Start(arguments, input));
  }

  std::filesystem::path folder_;
};

}  // namespace switchyard
