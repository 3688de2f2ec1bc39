// The look for NaN and infinity while a model is loaded.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "model/value_scan.h"
#include "switchyard/core/shape.h"
#include "switchyard/core/thread_pool.h"

namespace switchyard {

// Scans every view once, in units of some thousand elements: those about to be packed just before,
// so that the packer finds them in the cache, and what is left at the end. Refers to the views'
// bytes. ScanBefore may be called concurrently.
class LoadScan {
 public:
  // `names[i]` names `views[i]` in messages.
  LoadScan(std::vector<TensorView> views, std::vector<std::string> names);

  // Scans the units that begin in these bytes; bytes of no view are left alone.
  void ScanBefore(const std::byte* data, size_t bytes);
  // Scans, in parallel, what has not been scanned. Returns what was found, a line for each tensor
  // in the order of the views.
  std::vector<std::string> Finish(ThreadPool& pool);

 private:
  struct Tensor {
    TensorView view;
    std::string name;
    size_t unit_bytes = 0;
    size_t num_units = 0;
    size_t first_unit = 0;  // among those of all tensors
  };

  void ScanUnit(size_t tensor, size_t unit);
  std::string Describe(const Tensor& tensor, const ValueFindings& bad) const;

  std::vector<Tensor> tensors_;
  std::vector<size_t> by_address_;             // the tensors, by their first byte
  std::vector<std::atomic<bool>> is_scanned_;  // of each unit
  std::mutex mutex_;                           // guards found_
  std::vector<ValueFindings> found_;           // of each tensor
};

}  // namespace switchyard
