/* SPDX-License-Identifier: Apache-2.0
 *
 * Configuration, devices, contexts, versions and compile options of the stand-in.
 */
#define _POSIX_C_SOURCE 200809L
#include "standin.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static char soc_name[64] = "Ascend910_9391";
static char cann_version[64] = "9.1.0";
static uint64_t capacity = (uint64_t)64 << 30;
static int device_count = 1;

static _Thread_local int current_device = -1;
static int contexts[MAX_DEVICES]; /* only their addresses matter */

static pthread_mutex_t text_lock = PTHREAD_MUTEX_INITIALIZER;
static char recent_error[512];
static _Thread_local char recent_copy[512];
static uint64_t refused_calls;

/* ---- what Python calls ------------------------------------------------------------------- */

/* Must run before torch_npu asks for anything; the values are then fixed for the process. */
EXPORT int npu_backend_sim_configure(const char *soc, const char *cann, uint64_t memory,
                                     int devices)
{
    if (devices < 1 || devices > MAX_DEVICES || strlen(soc) >= sizeof soc_name ||
        strlen(cann) >= sizeof cann_version)
        return E_PARAM;
    strcpy(soc_name, soc);
    strcpy(cann_version, cann);
    capacity = memory;
    device_count = devices;
    return OK;
}

/* How many calls were answered with "not simulated" so far. */
EXPORT uint64_t npu_backend_sim_refused(void)
{
    return refused_calls;
}

/* Bytes taken from the device's capacity, for tests of memory truth. */
EXPORT uint64_t npu_backend_sim_used(int device)
{
    return standin_used(device);
}

/* ---- shared helpers ---------------------------------------------------------------------- */

int standin_current_device(void)
{
    return current_device < 0 ? 0 : current_device;
}

int standin_device_count(void)
{
    return device_count;
}

uint64_t standin_capacity(void)
{
    return capacity;
}

void standin_explain(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&text_lock);
    vsnprintf(recent_error, sizeof recent_error, format, arguments);
    pthread_mutex_unlock(&text_lock);
    va_end(arguments);
}

status standin_refuse(const char *name)
{
    __atomic_add_fetch(&refused_calls, 1, __ATOMIC_RELAXED);
    standin_explain("%s is not simulated by npu_backend.testing.sim", name);
    return E_UNSUPPORTED;
}

/* ---- start and end ----------------------------------------------------------------------- */

EXPORT status aclInit(const char *config)
{
    (void)config;
    return OK;
}

EXPORT status aclFinalize(void)
{
    return OK;
}

EXPORT const char *aclGetRecentErrMsg(void)
{
    /* A copy of the thread's own, because the caller reads it after the lock is gone. */
    pthread_mutex_lock(&text_lock);
    strcpy(recent_copy, recent_error);
    recent_error[0] = 0;
    pthread_mutex_unlock(&text_lock);
    return recent_copy;
}

EXPORT void aclAppLog(int level, const char *function, const char *file, uint32_t line,
                      const char *format, ...)
{
    (void)level, (void)function, (void)file, (void)line, (void)format;
}

/* ---- identity ---------------------------------------------------------------------------- */

EXPORT const char *aclrtGetSocName(void)
{
    return soc_name;
}

struct package_version {
    char version[128];
    char major[64], minor[64], release[64], patch[64];
    char reserved[128];
};

/* Every package of the simulated installation has the version of CANN itself. */
EXPORT status aclsysGetCANNVersion(int package, struct package_version *out)
{
    (void)package;
    memset(out, 0, sizeof *out);
    strcpy(out->version, cann_version);
    char *parts[] = {out->major, out->minor, out->release, out->patch};
    const char *from = cann_version;
    for (int i = 0; i < 4 && *from; i++) {
        size_t length = strcspn(from, ".");
        memcpy(parts[i], from, length);
        from += length;
        if (*from == '.')
            from++;
    }
    return OK;
}

EXPORT status aclsysGetVersionStr(char *package, char *out)
{
    (void)package;
    strcpy(out, cann_version);
    return OK;
}

/* ---- devices and contexts ---------------------------------------------------------------- */

EXPORT status aclrtGetDeviceCount(uint32_t *count)
{
    *count = (uint32_t)device_count;
    return OK;
}

EXPORT status aclrtSetDevice(int32_t device)
{
    if (device < 0 || device >= device_count) {
        standin_explain("device %d does not exist: %d simulated", device, device_count);
        return E_DEVICE;
    }
    current_device = device;
    return OK;
}

EXPORT status aclrtGetDevice(int32_t *device)
{
    /* As on hardware, a thread that has set none has none; torch_npu then sets device 0. */
    if (current_device < 0)
        return E_PARAM;
    *device = current_device;
    return OK;
}

EXPORT status aclrtResetDevice(int32_t device)
{
    (void)device;
    current_device = -1;
    return OK;
}

EXPORT status aclrtGetCurrentContext(void **context)
{
    if (current_device < 0)
        return E_PARAM;
    *context = &contexts[current_device];
    return OK;
}

EXPORT status aclrtSetCurrentContext(void *context)
{
    int *slot = context;
    if (slot < contexts || slot >= contexts + device_count)
        return E_PARAM;
    current_device = (int)(slot - contexts);
    return OK;
}

EXPORT status aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    if (device < 0 || device >= device_count)
        return E_DEVICE;
    if (flags)
        *flags = 0;
    *active = device == current_device;
    return OK;
}

EXPORT status aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic)
{
    *logic = user;
    return OK;
}

EXPORT status aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    (void)device, (void)peer;
    *can = 1; /* one host memory behind all devices */
    return OK;
}

EXPORT status aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags)
{
    (void)peer, (void)flags;
    return OK;
}

EXPORT status aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total)
{
    (void)kind;
    *total = (size_t)capacity;
    *free_bytes = (size_t)(capacity - standin_used(standin_current_device()));
    return OK;
}

/* ---- settings that torch_npu makes at start-up and that change nothing here --------------- */

EXPORT status aclrtSetDeviceSatMode(int mode)
{
    (void)mode;
    return OK;
}

EXPORT status aclrtSetOpExecuteTimeOut(uint32_t seconds)
{
    (void)seconds;
    return OK;
}

EXPORT status aclrtSetOpWaitTimeout(uint32_t seconds)
{
    (void)seconds;
    return OK;
}

/* Parameters and options are remembered, because torch_npu reads back what it set. */
enum { PARAMETERS = 32, OPTIONS = 32, OPTION_BYTES = 64 };
static int64_t parameters[PARAMETERS];
static char compile_options[OPTIONS][OPTION_BYTES];

EXPORT status aclrtSetSysParamOpt(int option, int64_t value)
{
    if (option < 0 || option >= PARAMETERS)
        return E_PARAM;
    parameters[option] = value;
    return OK;
}

EXPORT status aclrtGetSysParamOpt(int option, int64_t *value)
{
    if (option < 0 || option >= PARAMETERS)
        return E_PARAM;
    *value = parameters[option];
    return OK;
}

EXPORT status aclrtCtxSetSysParamOpt(int option, int64_t value)
{
    return aclrtSetSysParamOpt(option, value);
}

EXPORT status aclSetCompileopt(int option, const char *value)
{
    if (option < 0 || option >= OPTIONS || strlen(value) >= OPTION_BYTES)
        return E_PARAM;
    strcpy(compile_options[option], value);
    return OK;
}

EXPORT size_t aclGetCompileoptSize(int option)
{
    (void)option;
    return OPTION_BYTES; /* torch_npu takes a size of zero for a broken installation */
}

EXPORT status aclGetCompileopt(int option, char *value, size_t length)
{
    if (option < 0 || option >= OPTIONS || length == 0)
        return E_PARAM;
    snprintf(value, length, "%s", compile_options[option]);
    return OK;
}
