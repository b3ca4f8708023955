// HIP, hiprtc and hipBLASLt over CUDA's libraries, for tests on an NVIDIA card: the engine's tables of AMD's functions, with
// real streams, graphs, events and memory behind them. Each function calls its twin. What differs is turned back: numbers of
// attributes and of hipBLASLt, the target and the vendor's headers of a compilation, the size of an answer of the heuristic.
//
// The card says that it is a gfx1100 with 64 KiB of shared memory: 32 lanes, as it has. Built by build.sh as one library under
// three names. CUDA's libraries are found by the loader; SHIM_INTRINSICS names intrinsics_nvidia.cuh.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *p;
typedef unsigned u;
typedef unsigned long long ull;

static p library(const char *first, const char *second) {
  p found = dlopen(first, RTLD_NOW | RTLD_GLOBAL);
  if (!found) found = dlopen(second, RTLD_NOW | RTLD_GLOBAL);
  if (!found) {
    fprintf(stderr, "shim: %s\n", dlerror());
    abort();
  }
  return found;
}
static p driver(void) { static p of; return of ? of : (of = library("libcuda.so.1", "libcuda.so")); }
static p compiler(void) { static p of; return of ? of : (of = library("libnvrtc.so.13", "libnvrtc.so.12")); }
static p products(void) { static p of; return of ? of : (of = library("libcublasLt.so.13", "libcublasLt.so.12")); }

static p named(p of, const char *name) {
  p found = dlsym(of, name);
  if (!found) {
    fprintf(stderr, "shim: no %s\n", name);
    abort();
  }
  return found;
}

// A function with the signature of its twin.
#define TWIN(from, hip, cuda, parameters, arguments)                     \
  int hip parameters {                                                   \
    static int(*call) parameters;                                        \
    if (!call) call = (int(*) parameters)named(from(), cuda);            \
    return call arguments;                                               \
  }
#define DRIVER(hip, cuda, parameters, arguments) TWIN(driver, hip, cuda, parameters, arguments)

DRIVER(hipInit, "cuInit", (u flags), (flags))
DRIVER(hipDrvGetErrorName, "cuGetErrorName", (int e, const char **t), (e, t))
DRIVER(hipDrvGetErrorString, "cuGetErrorString", (int e, const char **t), (e, t))
DRIVER(hipGetDeviceCount, "cuDeviceGetCount", (int *n), (n))
DRIVER(hipDeviceGet, "cuDeviceGet", (int *d, int n), (d, n))
DRIVER(hipDeviceGetName, "cuDeviceGetName", (char *t, int n, int d), (t, n, d))
DRIVER(hipDeviceGetPCIBusId, "cuDeviceGetPCIBusId", (char *t, int n, int d), (t, n, d))
DRIVER(hipDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *n, int d), (n, d))
DRIVER(hipDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int *y, int a, int b), (y, a, b))
DRIVER(hipMemGetInfo, "cuMemGetInfo_v2", (size_t *f, size_t *t), (f, t))
DRIVER(hipMalloc, "cuMemAlloc_v2", (ull *at, size_t n), (at, n))
DRIVER(hipFree, "cuMemFree_v2", (ull at), (at))
DRIVER(hipHostMalloc, "cuMemHostAlloc", (p *at, size_t n, u f), (at, n, f))
DRIVER(hipHostFree, "cuMemFreeHost", (p at), (at))
DRIVER(hipHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (ull *to, p at, u f), (to, at, f))
DRIVER(hipMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (ull to, const void *from, size_t n, p s), (to, from, n, s))
DRIVER(hipMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (p to, ull from, size_t n, p s), (to, from, n, s))
DRIVER(hipMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (ull to, ull from, size_t n, p s), (to, from, n, s))
DRIVER(hipMemsetD8Async, "cuMemsetD8Async", (ull to, unsigned char x, size_t n, p s), (to, x, n, s))
DRIVER(hipMemsetD16Async, "cuMemsetD16Async", (ull to, unsigned short x, size_t n, p s), (to, x, n, s))
DRIVER(hipMemsetD32Async, "cuMemsetD32Async", (ull to, u x, size_t n, p s), (to, x, n, s))
DRIVER(hipStreamCreateWithFlags, "cuStreamCreate", (p *s, u f), (s, f))
DRIVER(hipStreamDestroy, "cuStreamDestroy_v2", (p s), (s))
DRIVER(hipStreamSynchronize, "cuStreamSynchronize", (p s), (s))
DRIVER(hipStreamQuery, "cuStreamQuery", (p s), (s))
DRIVER(hipStreamWaitEvent, "cuStreamWaitEvent", (p s, p e, u f), (s, e, f))
DRIVER(hipStreamBeginCapture, "cuStreamBeginCapture_v2", (p s, u mode), (s, mode))
DRIVER(hipStreamEndCapture, "cuStreamEndCapture", (p s, p *g), (s, g))
DRIVER(hipEventCreateWithFlags, "cuEventCreate", (p *e, u f), (e, f))
DRIVER(hipEventDestroy, "cuEventDestroy_v2", (p e), (e))
DRIVER(hipEventRecord, "cuEventRecord", (p e, p s), (e, s))
DRIVER(hipEventSynchronize, "cuEventSynchronize", (p e), (e))
DRIVER(hipEventQuery, "cuEventQuery", (p e), (e))
DRIVER(hipEventElapsedTime, "cuEventElapsedTime", (float *t, p a, p b), (t, a, b))
DRIVER(hipModuleLoadData, "cuModuleLoadData", (p *m, const void *code), (m, code))
DRIVER(hipModuleUnload, "cuModuleUnload", (p m), (m))
DRIVER(hipGraphGetNodes, "cuGraphGetNodes", (p g, p *nodes, size_t *n), (g, nodes, n))
DRIVER(hipGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", (p *x, p g, ull f), (x, g, f))
DRIVER(hipGraphUpload, "cuGraphUpload", (p x, p s), (x, s))
DRIVER(hipGraphLaunch, "cuGraphLaunch", (p x, p s), (x, s))
DRIVER(hipGraphDestroy, "cuGraphDestroy", (p g), (g))
DRIVER(hipGraphExecDestroy, "cuGraphExecDestroy", (p x), (x))
DRIVER(hipModuleLaunchKernel, "cuLaunchKernel",
       (p f, u gx, u gy, u gz, u bx, u by, u bz, u shared, p s, p *values, p *extra),
       (f, gx, gy, gz, bx, by, bz, shared, s, values, extra))

static DRIVER(set_function, "cuFuncSetAttribute", (p f, u which, int x), (f, which, x))
static DRIVER(get_function, "cuModuleGetFunction", (p *f, p m, const char *name), (f, m, name))
static DRIVER(get_attribute, "cuDeviceGetAttribute", (int *x, u which, int d), (x, which, d))
static DRIVER(retain, "cuDevicePrimaryCtxRetain", (p *c, int d), (c, d))
static DRIVER(set_current, "cuCtxSetCurrent", (p c), (c))
static DRIVER(enable_peer, "cuCtxEnablePeerAccess", (p c, u f), (c, f))
static DRIVER(copy_across, "cuMemcpyPeerAsync", (ull to, p a, ull from, p b, size_t n, p s), (to, a, from, b, n, s))

int hipDriverGetVersion(int *version) { *version = 70100000; return 0; }

// HIP lets every kernel have the shared memory of a block; CUDA has to be asked.
int hipModuleGetFunction(p *function, p module, const char *name) {
  const int status = get_function(function, module, name);
  return status ? status : set_function(*function, 8, 64 << 10);
}

static p context(int device) {
  static p of[64];
  if (!of[device]) retain(&of[device], device);
  return of[device];
}
int hipSetDevice(int device) { return set_current(context(device)); }
int hipDeviceEnablePeerAccess(int device, u flags) { return enable_peer(context(device), flags); }
int hipMemcpyPeerAsync(ull to, int a, ull from, int b, size_t n, p s) {
  return copy_across(to, context(a), from, context(b), n, s);
}

int hipDeviceGetAttribute(int *value, u which, int device) {
  static const u twins[][2] = {{5, 13}, {63, 16}, {23, 75}, {61, 76}, {60, 36}, {59, 37}, {19, 38}, {87, 10}};
  if (which == 74) { *value = 64 << 10; return 0; }
  for (size_t i = 0; i < sizeof twins / sizeof *twins; i++)
    if (twins[i][0] == which) return get_attribute(value, twins[i][1], device);
  return 1;
}
int hipGetDevicePropertiesR0600(char *properties, int device) {
  memset(properties, 0, 1472);
  strcpy(properties + 1160, "gfx1100");
  return hipDeviceGetName(properties, 256, device);
}

// hiprtc: the target and the headers of AMD GPUs become those of this card.
TWIN(compiler, hiprtcVersion, "nvrtcVersion", (int *a, int *b), (a, b))
TWIN(compiler, hiprtcDestroyProgram, "nvrtcDestroyProgram", (p *of), (of))
TWIN(compiler, hiprtcGetCodeSize, "nvrtcGetCUBINSize", (p of, size_t *n), (of, n))
TWIN(compiler, hiprtcGetCode, "nvrtcGetCUBIN", (p of, char *to), (of, to))
TWIN(compiler, hiprtcGetProgramLogSize, "nvrtcGetProgramLogSize", (p of, size_t *n), (of, n))
TWIN(compiler, hiprtcGetProgramLog, "nvrtcGetProgramLog", (p of, char *to), (of, to))
static TWIN(compiler, create, "nvrtcCreateProgram",
            (p *of, const char *text, const char *name, int n, const char *const *bodies, const char *const *names),
            (of, text, name, n, bodies, names))
static TWIN(compiler, compile, "nvrtcCompileProgram", (p of, int n, const char *const *options), (of, n, options))

const char *hiprtcGetErrorString(int status) {
  const char *(*call)(int) = (const char *(*)(int))named(compiler(), "nvrtcGetErrorString");
  return call(status);
}

static const char *intrinsics(void) {
  static char *text;
  if (text) return text;
  const char *path = getenv("SHIM_INTRINSICS");
  FILE *file = path ? fopen(path, "r") : NULL;
  if (!file) {
    fprintf(stderr, "shim: SHIM_INTRINSICS has to name intrinsics_nvidia.cuh\n");
    abort();
  }
  char *whole = calloc(1, 1 << 20);
  if (fread(whole, 1, (1 << 20) - 1, file) == 0) abort();
  fclose(file);
  return text = whole;
}

int hiprtcCreateProgram(p *of, const char *text, const char *name, int n, const char *const *bodies, const char *const *names) {
  static const char begin[] = "#include \"language.cuh\"\n#line 1\n";
  if (!strncmp(text, begin, sizeof begin - 1)) text += sizeof begin - 1;
  const char *own[n];
  for (int i = 0; i < n; i++) {
    own[i] = bodies[i];
    if (!strcmp(names[i], "intrinsics.cuh")) own[i] = intrinsics();
    if (!strcmp(names[i], "language.cuh")) own[i] = "";
  }
  return create(of, text, name, n, own, names);
}
int hiprtcCompileProgram(p of, int n, const char *const *options) {
  int major = 0, minor = 0, kept = 0;
  get_attribute(&major, 75, 0);
  get_attribute(&minor, 76, 0);
  char target[64];
  snprintf(target, sizeof target, "--gpu-architecture=sm_%d%d", major, minor);
  const char *own[n];
  for (int i = 0; i < n; i++) {
    if (!strcmp(options[i], "-O3")) continue;
    own[kept++] = strncmp(options[i], "--offload-arch=", 15) ? options[i] : target;
  }
  return compile(of, kept, own);
}

// hipBLASLt: numbers become cuBLASLt's; algorithms are kept here by their number.
static TWIN(products, lt_create, "cublasLtCreate", (p *h), (h))
static TWIN(products, lt_describe, "cublasLtMatmulDescCreate", (p *d, u compute, u scale), (d, compute, scale))
static TWIN(products, lt_set, "cublasLtMatmulDescSetAttribute", (p d, u which, const void *x, size_t n), (d, which, x, n))
static TWIN(products, lt_set_layout, "cublasLtMatrixLayoutSetAttribute", (p l, u which, const void *x, size_t n), (l, which, x, n))
static TWIN(products, lt_heuristic, "cublasLtMatmulAlgoGetHeuristic",
            (p h, p d, p a, p b, p c, p o, p pref, int n, void *results, int *found), (h, d, a, b, c, o, pref, n, results, found))
static TWIN(products, lt_matmul, "cublasLtMatmul",
            (p h, p d, const void *alpha, const void *a, p la, const void *b, p lb, const void *beta, const void *c, p lc, p o,
             p lo, const void *algo, p work, size_t n, p s),
            (h, d, alpha, a, la, b, lb, beta, c, lc, o, lo, algo, work, n, s))
TWIN(products, hipblasLtDestroy, "cublasLtDestroy", (p h), (h))
TWIN(products, hipblasLtMatmulDescDestroy, "cublasLtMatmulDescDestroy", (p d), (d))
TWIN(products, hipblasLtMatrixLayoutCreate, "cublasLtMatrixLayoutCreate", (p *l, u type, ull r, ull c, long long ld), (l, type, r, c, ld))
TWIN(products, hipblasLtMatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy", (p l), (l))
TWIN(products, hipblasLtMatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate", (p *of), (of))
TWIN(products, hipblasLtMatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy", (p of), (of))
TWIN(products, hipblasLtMatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute", (p of, u which, const void *x, size_t n), (of, which, x, n))

int hipblasLtCreate(p *handle) { return lt_create(handle); }
int hipblasLtGetVersion(p handle, int *version) { (void)handle; *version = 100100; return 0; }
int hipblasLtMatmulDescCreate(p *d, u compute, u scale) { return compute == 2 ? lt_describe(d, 68, scale) : 7; }

int hipblasLtMatmulDescSetAttribute(p d, u which, const void *x, size_t n) {
  static const u twins[][2] = {{0, 3}, {1, 4}, {2, 7}, {3, 8}, {4, 26}, {5, 17}, {6, 18}, {13, 2}, {31, 31}, {32, 32}};
  for (size_t i = 0; i < sizeof twins / sizeof *twins; i++) {
    if (twins[i][0] != which) continue;
    if (which > 1) return lt_set(d, twins[i][1], x, n);
    const int operation = *(const int *)x - 111;
    return operation == 0 || operation == 1 ? lt_set(d, twins[i][1], &operation, sizeof operation) : 3;
  }
  return 3;
}
int hipblasLtMatrixLayoutSetAttribute(p l, u which, const void *x, size_t n) {
  return which < 2 ? lt_set_layout(l, which + 5, x, n) : 3;
}

struct answer { uint64_t algorithm[3]; size_t workspace; u state; float waves; int reserved[4]; };
struct cuda_answer { uint64_t algorithm[8]; size_t workspace; u state; float waves; int reserved[4]; };
static uint64_t known[1 << 16][8];
static uint64_t known_count;

static uint64_t number_of(const uint64_t *algorithm) {
  for (uint64_t i = 0; i < known_count; i++)
    if (!memcmp(known[i], algorithm, 64)) return i;
  if (known_count == 1 << 16) abort();
  memcpy(known[known_count], algorithm, 64);
  return known_count++;
}

int hipblasLtMatmulAlgoGetHeuristic(p h, p d, p a, p b, p c, p o, p pref, int n, struct answer *results, int *found) {
  struct cuda_answer own[n];
  const int status = lt_heuristic(h, d, a, b, c, o, pref, n, own, found);
  for (int i = 0; status == 0 && i < *found; i++)
    results[i] = (struct answer){{number_of(own[i].algorithm), 7, 7}, own[i].workspace, own[i].state, own[i].waves, {0}};
  return status;
}
int hipblasLtMatmul(p h, p d, const void *alpha, const void *a, p la, const void *b, p lb, const void *beta, const void *c, p lc,
                    p o, p lo, const uint64_t *algorithm, p work, size_t n, p s) {
  return lt_matmul(h, d, alpha, a, la, b, lb, beta, c, lc, o, lo, known[algorithm[0]], work, n, s);
}
