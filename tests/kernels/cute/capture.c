// What a CuTeDSL object calls in place of the CUDA runtime when it runs on a CPU: a launch is handed to `hook`, everything else succeeds.
#include <stddef.h>

typedef void (*Hook)(const void* config, void** arguments);
static Hook hook;
void set_hook(Hook given) { hook = given; }

int _cudaLaunchKernelEx(const void* config, const void* kernel, void** arguments) { return hook(config, arguments), kernel == NULL; }
int _cudaLibraryLoadData(void** library) { return *library = &hook, 0; }
int _cudaLibraryGetKernel(void** kernel, void* library) { return *kernel = library, 0; }
int _cudaGetDevice(int* device) { return *device = 0, 0; }
int _cudaDeviceGetAttribute(int* value) { return *value = 227 << 10, 0; }
int _cuKernelGetAttribute(int* value) { return *value = 227 << 10, 0; }
int _cudaFuncSetAttribute(void) { return 0; }
int _cudaKernelSetAttributeForDevice(void) { return 0; }
