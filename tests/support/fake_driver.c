/* A CUDA driver of one device without a device: memory is the host's, streams run at once, and the three kernels are
 * written out in C. It counts what it hands out and what comes back, answers as a driver does to wrong handles and
 * addresses, and fails on request: FAKE_FAIL="cuMemHostRegister_v2:2=2" makes the second such call answer 2.
 *
 * Built by test_fake_driver.py as libcuda.so.1. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { CONTEXT, MEMORY, REGISTRATION, STREAM, EVENT, MODULE, KINDS };
static const char *const NAMES[KINDS] = {"context", "memory", "registration", "stream", "event", "module"};
#define SLOTS 65536

typedef struct { int kind; uintptr_t address; size_t bytes; } Object;
typedef struct { double time_ms; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Object objects[SLOTS];
static int context_cell;
static const uint64_t CAPACITY = (uint64_t)1 << 30;
static _Thread_local void *current;

static Object *find(int kind, uintptr_t address) {
    for (int i = 0; i < SLOTS; i++)
        if (objects[i].address == address && objects[i].kind == kind) return &objects[i];
    return NULL;
}

static Object *containing(int kind, uintptr_t address, size_t bytes) {
    for (int i = 0; i < SLOTS; i++)
        if (objects[i].address && objects[i].kind == kind && address >= objects[i].address &&
            address + bytes <= objects[i].address + objects[i].bytes) return &objects[i];
    return NULL;
}

static void keep(int kind, uintptr_t address, size_t bytes) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++)
        if (!objects[i].address) { objects[i] = (Object){kind, address, bytes}; break; }
    pthread_mutex_unlock(&lock);
}

static int give_back(int kind, uintptr_t address) {
    pthread_mutex_lock(&lock);
    Object *object = find(kind, address);
    if (object) object->address = 0;
    pthread_mutex_unlock(&lock);
    return object != NULL;
}

/* How many of a kind are out, for the tests. */
int fake_live(const char *name) {
    int live = 0;
    for (int i = 0; i < SLOTS; i++) live += objects[i].address && !strcmp(NAMES[objects[i].kind], name);
    return live;
}

static int failing(const char *call) {
    static int count;
    const char *wanted = getenv("FAKE_FAIL");
    int nth, code;
    char name[64];
    if (!wanted || sscanf(wanted, "%63[^:]:%d=%d", name, &nth, &code) != 3 || strcmp(name, call)) return 0;
    return __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST) == nth ? code : 0;
}
#define BEGIN do { int code_ = failing(__func__); if (code_) return code_; } while (0)
#define IN_CONTEXT do { BEGIN; if (current != &context_cell) return INVALID_CONTEXT; } while (0)

int cuInit(unsigned flags) { BEGIN; return flags ? INVALID_VALUE : SUCCESS; }
int cuDriverGetVersion(int *version) { BEGIN; *version = 12080; return SUCCESS; }
int cuDeviceGetCount(int *count) { BEGIN; *count = 1; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { BEGIN; *device = ordinal; return ordinal ? INVALID_DEVICE : SUCCESS; }
int cuDeviceGetName(char *name, int len, int device) { BEGIN; (void)device; snprintf(name, len, "Fake"); return SUCCESS; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { BEGIN; (void)device; *bytes = CAPACITY; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    BEGIN;
    (void)device;
    const char *capability = getenv("FAKE_CAPABILITY");
    int major = 9, minor = 0;
    if (capability) sscanf(capability, "%d.%d", &major, &minor);
    *value = which == 75 ? major : which == 76 ? minor : which == 16 ? 4 : 0;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN;
    (void)device;
    *context = &context_cell;
    keep(CONTEXT, (uintptr_t)&context_cell, 0);
    return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN;
    (void)device;
    return give_back(CONTEXT, (uintptr_t)&context_cell) ? SUCCESS : INVALID_CONTEXT;
}
int cuCtxGetCurrent(void **context) { BEGIN; *context = current; return SUCCESS; }
int cuCtxSetCurrent(void *context) { BEGIN; current = context; return SUCCESS; }
int cuCtxSynchronize(void) { IN_CONTEXT; return SUCCESS; }

static uint64_t used(void) {
    uint64_t bytes = 0;
    for (int i = 0; i < SLOTS; i++) if (objects[i].address && objects[i].kind == MEMORY) bytes += objects[i].bytes;
    return bytes;
}
int cuMemGetInfo_v2(size_t *available, size_t *total) {
    IN_CONTEXT;
    *available = CAPACITY - used();
    *total = CAPACITY;
    return SUCCESS;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    IN_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    if (bytes > CAPACITY - used()) return OUT_OF_MEMORY;
    /* 256 bytes are what a driver promises, and not 512. */
    char *memory = aligned_alloc(512, (bytes + 256 + 511) / 512 * 512);
    memset(memory, 0xAB, bytes + 256);
    *address = (uintptr_t)memory + 256;
    keep(MEMORY, *address, bytes);
    return SUCCESS;
}
int cuMemFree_v2(uint64_t address) {
    IN_CONTEXT;
    if (!give_back(MEMORY, address)) return INVALID_VALUE;
    free((void *)(uintptr_t)(address - 256));
    return SUCCESS;
}
int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    IN_CONTEXT;
    (void)flags;
    pthread_mutex_lock(&lock);
    int taken = find(REGISTRATION, (uintptr_t)memory) != NULL;
    pthread_mutex_unlock(&lock);
    if (taken) return ALREADY_REGISTERED;
    keep(REGISTRATION, (uintptr_t)memory, bytes);
    return SUCCESS;
}
int cuMemHostUnregister(void *memory) {
    IN_CONTEXT;
    return give_back(REGISTRATION, (uintptr_t)memory) ? SUCCESS : NOT_REGISTERED;
}

static int on_stream(void *stream) { return !stream || find(STREAM, (uintptr_t)stream) ? SUCCESS : INVALID_HANDLE; }
#define QUEUED(stream, address, bytes) \
    IN_CONTEXT; \
    if (on_stream(stream)) return INVALID_HANDLE; \
    if (!containing(MEMORY, address, bytes)) return INVALID_VALUE

int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t bytes, void *stream) {
    QUEUED(stream, address, bytes);
    memset((void *)(uintptr_t)address, byte, bytes);
    return SUCCESS;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    QUEUED(stream, to, bytes);
    memcpy((void *)(uintptr_t)to, from, bytes);
    return SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    QUEUED(stream, from, bytes);
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return SUCCESS;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    QUEUED(stream, from, bytes);
    if (!containing(MEMORY, to, bytes)) return INVALID_VALUE;
    memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return SUCCESS;
}

static int make(void **handle, int kind, size_t bytes) {
    *handle = calloc(1, bytes);
    keep(kind, (uintptr_t)*handle, bytes);
    return SUCCESS;
}
static int end(void *handle, int kind) {
    if (!give_back(kind, (uintptr_t)handle)) return INVALID_HANDLE;
    free(handle);
    return SUCCESS;
}
int cuStreamCreate(void **stream, unsigned flags) { IN_CONTEXT; return flags == 1 ? make(stream, STREAM, 8) : INVALID_VALUE; }
int cuStreamDestroy_v2(void *stream) { IN_CONTEXT; return end(stream, STREAM); }
int cuStreamSynchronize(void *stream) { IN_CONTEXT; return on_stream(stream); }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    IN_CONTEXT;
    return flags || on_stream(stream) || !find(EVENT, (uintptr_t)event) ? INVALID_HANDLE : SUCCESS;
}
int cuEventCreate(void **event, unsigned flags) { IN_CONTEXT; (void)flags; return make(event, EVENT, sizeof(Event)); }
int cuEventDestroy_v2(void *event) { IN_CONTEXT; return end(event, EVENT); }
int cuEventRecord(void *event, void *stream) {
    IN_CONTEXT;
    if (on_stream(stream) || !find(EVENT, (uintptr_t)event)) return INVALID_HANDLE;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((Event *)event)->time_ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    return SUCCESS;
}
int cuEventQuery(void *event) { IN_CONTEXT; return find(EVENT, (uintptr_t)event) ? SUCCESS : INVALID_HANDLE; }
int cuEventSynchronize(void *event) { IN_CONTEXT; return find(EVENT, (uintptr_t)event) ? SUCCESS : INVALID_HANDLE; }
int cuEventElapsedTime(float *ms, void *from, void *to) {
    IN_CONTEXT;
    *ms = (float)(((Event *)to)->time_ms - ((Event *)from)->time_ms);
    return SUCCESS;
}

int cuModuleLoadDataEx(void **module, const void *image, unsigned options, void *names, void *values) {
    (void)names;
    int code = failing(__func__);
    if (code) {
        if (options == 2) strcpy(((char **)values)[0], "ptxas fatal: as asked");
        return code;
    }
    return strstr(image, ".version") ? make(module, MODULE, 8) : INVALID_VALUE;
}
int cuModuleUnload(void *module) { IN_CONTEXT; return end(module, MODULE); }

static float bf16(uint16_t bits) { uint32_t wide = (uint32_t)bits << 16; float value; memcpy(&value, &wide, 4); return value; }
static float settled(float x) { return isnan(x) ? bf16(0x7fc0) : fabsf(x) < 0x1p-126f ? 0.0f : x; }

static void adamw(void **args, int is_split) {
    uint64_t address[5], numel;
    for (int i = 0; i < 5; i++) address[i] = *(uint64_t *)args[i];
    numel = *(uint64_t *)args[5];
    uint32_t flags = *(uint32_t *)args[6];
    float c[9];
    for (int i = 0; i < 9; i++) c[i] = *(float *)args[7 + i];
    uint16_t *upper = (uint16_t *)(uintptr_t)address[0], *lower = (uint16_t *)(uintptr_t)address[1];
    float *full = (float *)(uintptr_t)address[0], *m = (float *)(uintptr_t)address[2], *v = (float *)(uintptr_t)address[3];
    for (uint64_t i = 0; i < numel; i++) {
        float g = flags & 2 ? ((float *)(uintptr_t)address[4])[i] : bf16(((uint16_t *)(uintptr_t)address[4])[i]), w;
        uint32_t bits = is_split ? ((uint32_t)upper[i] << 16) + (uint32_t)(int16_t)lower[i] : 0;
        if (is_split) memcpy(&w, &bits, 4); else w = full[i];
        g = g * c[0];
        m[i] = settled(fmaf(c[1], m[i], c[2] * g));
        v[i] = settled(fmaf(c[3], v[i], (c[4] * g) * g));
        w = fmaf(-c[7], m[i] / fmaf(sqrtf(v[i]), c[5], c[6]), w * c[8]);
        if (isnan(w)) w = bf16(0x7fc0);
        memcpy(&bits, &w, 4);
        if (is_split) { upper[i] = (uint16_t)((bits + 0x8000) >> 16); lower[i] = (uint16_t)bits; } else full[i] = w;
    }
}

/* AdamW over smaller states, as adamw/kernels/compact.rs says: flags 4 bf16 moments, 8 8-bit ones, 16 a master of 24 bits, 32 fp32 weights. */
static uint32_t mixed(uint32_t counter, uint32_t low, uint32_t high) {
    uint32_t x = counter * 0x9e3779b9u + low;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + high) * 0x846ca68bu;
    return x ^ (x >> 16);
}
static uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static float bounded(float x) { x = fabsf(x); return x < of_bits(0x7e7fffff) ? x : of_bits(0x7e7fffff); }
static float share(uint32_t code, int is_signed) {
    float root = (float)code * (is_signed ? 1.0f / 127.0f : 1.0f / 255.0f), square = root * root;
    return is_signed ? square : square * square;
}
static void decode(const uint8_t *from, float *to, int is_signed) {
    for (int i = 0; i < 128; i++) {
        uint32_t exponent = from[128 + i / 32] < 252 ? from[128 + i / 32] : 252, code = from[i];
        float magnitude = share(is_signed ? code & 127 : code, is_signed) * of_bits((exponent + 1) << 23);
        to[i] = of_bits(bits_of(magnitude) | (is_signed ? (code & 128) << 24 : 0));
    }
}
static void encode(const float *from, const uint32_t *random, uint8_t *to, int is_signed) {
    for (int part = 0; part < 4; part++) {
        uint32_t top = 0;
        for (int i = part * 32; i < part * 32 + 32; i++) if (bits_of(bounded(from[i])) > top) top = bits_of(bounded(from[i]));
        uint32_t exponent = top >> 23;
        to[128 + part] = (uint8_t)exponent;
        for (int i = part * 32; i < part * 32 + 32; i++) {
            float magnitude = bounded(from[i]), of = magnitude * of_bits((253 - exponent) << 23);
            float root = is_signed ? sqrtf(of) : sqrtf(sqrtf(of)), at = root * (is_signed ? 127.0f : 255.0f) - 0.5f;
            uint32_t below = bits_of((at > 0 ? at : 0) + 8388608.0f) & 0xff, last = is_signed ? 126 : 254;
            if (below > last) below = last;
            float lower = share(below, is_signed), upper = share(below + 1, is_signed);
            float threshold = ((float)(is_signed ? random[i] & 0xffff : random[i] >> 16) + 0.5f) * (1.0f / 65536.0f);
            uint32_t code = below + (of - lower > (upper - lower) * threshold);
            if (!is_signed && magnitude > 0 && !code) code = 1;
            to[i] = (uint8_t)(code | (is_signed ? (bits_of(from[i]) >> 24) & 128 : 0));
        }
    }
}
static void adamw_compact(void **args) {
    uint8_t *at[5];
    for (int i = 0; i < 5; i++) at[i] = (uint8_t *)(uintptr_t)*(uint64_t *)args[i];
    uint64_t numel = *(uint64_t *)args[5];
    uint32_t flags = *(uint32_t *)args[6], first = *(uint32_t *)args[16], low = *(uint32_t *)args[17], high = *(uint32_t *)args[18];
    float c[9];
    for (int i = 0; i < 9; i++) c[i] = *(float *)args[7 + i];
    for (uint64_t start = 0; start < numel; start += 128) {
        int count = numel - start < 128 ? (int)(numel - start) : 128;
        float m[128] = {0}, v[128] = {0};
        uint32_t random[128];
        uint8_t *packed[2] = {at[2] + start / 128 * 132, at[3] + start / 128 * 132};
        if (flags & 8) { decode(packed[0], m, 1); decode(packed[1], v, 0); }
        for (int k = 0; k < 128; k++) {
            uint64_t i = start + (uint64_t)k;
            random[k] = mixed(first + (uint32_t)i, low, high);
            float w = 0, g = 0;
            if (k < count) {
                uint32_t hi = (uint32_t)((uint16_t *)at[0])[i] << 16;
                if (flags & 32) w = ((float *)at[0])[i];
                else w = of_bits(flags & 16 ? hi + ((uint32_t)(int8_t)at[1][i] << 8) : hi + (uint32_t)((int16_t *)at[1])[i]);
                g = flags & 2 ? ((float *)at[4])[i] : bf16(((uint16_t *)at[4])[i]);
                if (flags & 4) { m[k] = bf16(((uint16_t *)at[2])[i]); v[k] = bf16(((uint16_t *)at[3])[i]); }
                if (!(flags & 12)) { m[k] = ((float *)at[2])[i]; v[k] = ((float *)at[3])[i]; }
            }
            g = g * c[0];
            m[k] = settled(fmaf(c[1], m[k], c[2] * g));
            v[k] = settled(fmaf(c[3], v[k], (c[4] * g) * g));
            w = fmaf(-c[7], m[k] / fmaf(sqrtf(v[k]), c[5], c[6]), w * c[8]);
            if (isnan(w)) w = bf16(0x7fc0);
            if (k >= count) continue;
            uint32_t bits = bits_of(w);
            if (flags & 32) ((float *)at[0])[i] = w;
            else if (flags & 16) {
                bits += random[k] * 0x9e3779b1u >> 24;
                ((uint16_t *)at[0])[i] = (uint16_t)(((bits & 0xffffff00u) + 0x8000) >> 16);
                at[1][i] = (uint8_t)(bits >> 8);
            } else { ((uint16_t *)at[0])[i] = (uint16_t)((bits + 0x8000) >> 16); ((uint16_t *)at[1])[i] = (uint16_t)bits; }
            if (flags & 4) {
                ((uint16_t *)at[2])[i] = (uint16_t)((bits_of(m[k]) + (random[k] & 0xffff)) >> 16);
                ((uint16_t *)at[3])[i] = (uint16_t)((bits_of(v[k]) + (random[k] >> 16)) >> 16);
            }
            if (!(flags & 12)) { ((float *)at[2])[i] = m[k]; ((float *)at[3])[i] = v[k]; }
        }
        if (flags & 8) { encode(m, random, packed[0], 1); encode(v, random, packed[1], 0); }
    }
}

static void sum_squares(void **args, unsigned blocks) {
    char *source = (char *)(uintptr_t)*(uint64_t *)args[0];
    uint64_t *table = (uint64_t *)(uintptr_t)*(uint64_t *)args[1];
    double *out = (double *)(uintptr_t)*(uint64_t *)args[2];
    uint32_t wide = *(uint32_t *)args[3];
    for (unsigned block = 0; block < blocks; block++) {
        double lanes[256] = {0};
        for (uint64_t i = 0; i < table[2 * block + 1]; i++) {
            uint64_t at = table[2 * block] + i;
            double x = wide ? ((float *)source)[at] : bf16(((uint16_t *)source)[at]);
            lanes[i / 8 % 256] = fma(x, x, lanes[i / 8 % 256]);
        }
        for (int half = 128; half; half /= 2) for (int t = 0; t < half; t++) lanes[t] += lanes[t + half];
        out[block] = lanes[0];
    }
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    IN_CONTEXT;
    static const char *const KERNELS[] = {"adamw_split", "adamw_fp32", "adamw_compact", "sum_squares"};
    if (!find(MODULE, (uintptr_t)module)) return INVALID_HANDLE;
    for (int i = 0; i < 4; i++) if (!strcmp(name, KERNELS[i])) { *function = (void *)KERNELS[i]; return SUCCESS; }
    return NOT_FOUND;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **args, void **extra) {
    IN_CONTEXT;
    if (on_stream(stream)) return INVALID_HANDLE;
    if (y != 1 || z != 1 || ty != 1 || tz != 1 || shared || extra || threads != 256 || !x) return INVALID_VALUE;
    if (!strcmp(function, "sum_squares")) sum_squares(args, x);
    else if (!strcmp(function, "adamw_compact")) adamw_compact(args);
    else adamw(args, !strcmp(function, "adamw_split"));
    return SUCCESS;
}
