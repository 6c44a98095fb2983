// libcudart.so.13 for a machine without a device: as much of it as PyTorch's caching allocator calls.
//
// It hands out addresses that nobody may touch and counts bytes. An event is over when the stream has
// been finished (stand_in_finish) after the event was recorded, or when somebody waits for it.
// STAND_IN_BYTES is the memory of the device. With STAND_IN_DOWNWARDS each segment is below the last. What is in unused.cpp ends the program.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {

constexpr size_t kPage = 2 << 20;  // what the device hands out is a multiple of it

struct Event {
  cudaStream_t stream;
  uint64_t number;
};

size_t used = 0;
uintptr_t next_address = uintptr_t{1} << 45;
std::map<uint64_t, size_t> sizes;  // by address, or by handle of physical memory
uint64_t next_handle = 1;
uint64_t recorded = 0;
std::map<cudaStream_t, uint64_t> finished;  // events up to this number are over

size_t total() {
  return std::strtoull(std::getenv("STAND_IN_BYTES"), nullptr, 10);
}

uintptr_t addresses(size_t size) {
  const uintptr_t room = (size + kPage - 1) / kPage * kPage + kPage;  // segments do not touch
  if (std::getenv("STAND_IN_DOWNWARDS") != nullptr) {
    return next_address -= room;
  }
  return (next_address += room) - room;
}

bool take(uint64_t key, size_t size) {
  if (used + size > total()) {
    return false;
  }
  used += size;
  sizes[key] = size;
  return true;
}

void give(uint64_t key) {
  used -= sizes.at(key);
  sizes.erase(key);
}

Event* event(cudaEvent_t handle) {
  return reinterpret_cast<Event*>(handle);
}

CUresult mem_address_reserve(CUdeviceptr* found, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *found = addresses(size);
  return CUDA_SUCCESS;
}

CUresult mem_create(
    CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  if (!take(next_handle, size)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = next_handle++;
  return CUDA_SUCCESS;
}

CUresult mem_release(CUmemGenericAllocationHandle handle) {
  give(handle);
  return CUDA_SUCCESS;
}

CUresult granularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = kPage;
  return CUDA_SUCCESS;
}

CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 1;
  return CUDA_SUCCESS;
}

CUresult nothing() {
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void stand_in_finish(cudaStream_t stream) {
  finished[stream] = recorded;
}

cudaError_t cudaMalloc(void** found, size_t size) {
  if (used + size > total()) {
    return cudaErrorMemoryAllocation;
  }
  const uintptr_t address = addresses(size);
  take(address, size);
  *found = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  give(reinterpret_cast<uintptr_t>(address));
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* all) {
  *all = total();
  *available = total() - used;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  std::memset(found, 0, sizeof *found);
  found->totalGlobalMem = total();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  *handle = reinterpret_cast<cudaEvent_t>(new Event{});
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete event(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  *event(handle) = {stream, ++recorded};
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return finished[event(handle)->stream] >= event(handle)->number ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  if (cudaEventQuery(handle) != cudaSuccess) {
    finished[event(handle)->stream] = event(handle)->number;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(mem_address_reserve)},
      {"cuMemCreate", reinterpret_cast<void*>(mem_create)},
      {"cuMemRelease", reinterpret_cast<void*>(mem_release)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(attribute)},
  };
  const auto place = known.find(name);
  *found = place == known.end() ? reinterpret_cast<void*>(nothing) : place->second;
  if (result != nullptr) {
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
    const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }

}  // extern "C"
