// Serves requests on standard input with PyTorch's own caching allocator and prints its statistics.
//
// A request is a line: take NAME BYTES STREAM, use NAME STREAM, give NAME, finish STREAM, empty.
// Settings come from PYTORCH_ALLOC_CONF. An argument is the part of the device that may be used.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <unordered_map>

namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*has)(c10::DeviceIndex));  // libtorch_cuda, which is not here, sets it
}

extern "C" void stand_in_finish(cudaStream_t stream);

namespace {

c10::cuda::CUDAStream stream(int number) {
  const auto handle = reinterpret_cast<cudaStream_t>(uintptr_t(number + 1) << 8);
  return c10::cuda::getStreamFromExternal(handle, 0);
}

void print(const std::string& name, const c10::CachingAllocator::StatArray& stats) {
  const char* pools[] = {"all", "small_pool", "large_pool"};
  for (int pool = 0; pool < 3; ++pool) {
    std::cout << name << "." << pools[pool] << ".current " << stats[pool].current << "\n"
              << name << "." << pools[pool] << ".peak " << stats[pool].peak << "\n";
  }
}

}  // namespace

int main(int count, char** arguments) {
  c10::cuda::_internal::setHasPrimaryContext(+[](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(1);
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  allocator->init(1);
  if (count > 1) {
    allocator->setMemoryFraction(std::stod(arguments[1]), 0);
  }
  std::unordered_map<std::string, c10::DataPtr> live;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string what, name;
    size_t bytes = 0;
    int number = 0;
    words >> what;
    if (what == "take") {
      words >> name >> bytes >> number;
      c10::cuda::setCurrentCUDAStream(stream(number));
      try {
        live.emplace(name, allocator->allocate(bytes));
      } catch (const c10::OutOfMemoryError&) {
      }
    } else if (what == "use") {
      words >> name >> number;
      if (live.count(name) != 0) {
        allocator->recordStream(live.at(name), stream(number));
      }
    } else if (what == "give") {
      words >> name;
      live.erase(name);
    } else if (what == "finish") {
      words >> number;
      stand_in_finish(stream(number).stream());
    } else if (what == "empty") {
      allocator->emptyCache({0, 0});
    } else {
      return 2;
    }
  }
  const auto found = allocator->getDeviceStats(0);
  print("allocation", found.allocation);
  print("segment", found.segment);
  print("active", found.active);
  print("inactive_split", found.inactive_split);
  print("allocated_bytes", found.allocated_bytes);
  print("reserved_bytes", found.reserved_bytes);
  print("active_bytes", found.active_bytes);
  print("inactive_split_bytes", found.inactive_split_bytes);
  print("requested_bytes", found.requested_bytes);
  std::cout << "num_alloc_retries " << found.num_alloc_retries << "\n"
            << "num_ooms " << found.num_ooms << "\n"
            << "num_sync_all_streams " << found.num_sync_all_streams << "\n"
            << "num_device_alloc " << found.num_device_alloc << "\n"
            << "num_device_free " << found.num_device_free << "\n";
  std::cout.flush();
  std::_Exit(0);  // what is live stays so: its memory is nowhere
}
