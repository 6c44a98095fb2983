// The rest of what libc10_cuda.so takes from the CUDA runtime: no list of requests gets here.

#include <cstdlib>

extern "C" {

#define NOT_HERE(name) \
  int name() { std::abort(); }
NOT_HERE(cudaDeviceCanAccessPeer)
NOT_HERE(cudaDeviceEnablePeerAccess)
NOT_HERE(cudaDeviceGetDefaultMemPool)
NOT_HERE(cudaEventElapsedTime)
NOT_HERE(cudaFreeAsync)
NOT_HERE(cudaGraphNodeGetDependencies)
NOT_HERE(cudaIpcCloseMemHandle)
NOT_HERE(cudaIpcGetMemHandle)
NOT_HERE(cudaIpcOpenMemHandle)
NOT_HERE(cudaMallocAsync)
NOT_HERE(cudaMemPoolGetAttribute)
NOT_HERE(cudaMemPoolSetAccess)
NOT_HERE(cudaMemPoolSetAttribute)
NOT_HERE(cudaMemPoolTrimTo)
NOT_HERE(cudaMemcpy)
NOT_HERE(cudaMemcpyAsync)
NOT_HERE(cudaMemcpyPeerAsync)
NOT_HERE(cudaStreamCreateWithPriority)
NOT_HERE(cudaStreamQuery)
NOT_HERE(cudaStreamWaitEvent)
NOT_HERE(cudaThreadExchangeStreamCaptureMode)

}  // extern "C"
