// libnvidia-ml.so.1 for a machine without a device: one device, no NVLink fabric, no other process.

extern "C" {

int nvmlInit_v2() { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  static int only;
  *device = &only;
  return 0;
}

int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }

int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

// Never called, but looked up when the library is loaded.
int nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 3; }
int nvmlSystemGetCudaDriverVersion_v2() { return 3; }

}  // extern "C"
