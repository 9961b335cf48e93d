/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams and events of the stand-in. Everything runs at once on the calling thread, so a stream
 * is always drained and an event always complete; times between events are not simulated.
 */
#define _POSIX_C_SOURCE 200809L
#include "standin.h"

#include <stdlib.h>
#include <time.h>

static status create(void **out)
{
    *out = calloc(1, 8);
    return *out ? OK : E_NO_MEMORY;
}

static status destroy(void *handle)
{
    free(handle);
    return OK;
}

EXPORT status aclrtCreateStream(void **out)
{
    return create(out);
}

EXPORT status aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flag)
{
    (void)priority, (void)flag;
    return create(out);
}

EXPORT status aclrtDestroyStream(void *stream)
{
    return destroy(stream);
}

EXPORT status aclrtDestroyStreamForce(void *stream)
{
    return destroy(stream);
}

EXPORT status aclrtCreateEventWithFlag(void **out, uint32_t flag)
{
    (void)flag;
    return create(out);
}

EXPORT status aclrtCreateEventExWithFlag(void **out, uint32_t flag)
{
    (void)flag;
    return create(out);
}

EXPORT status aclrtDestroyEvent(void *event)
{
    return destroy(event);
}

EXPORT status aclrtStreamQuery(void *stream, int32_t *state)
{
    (void)stream;
    *state = 0; /* complete */
    return OK;
}

EXPORT status aclrtQueryEventStatus(void *event, int32_t *state)
{
    (void)event;
    *state = 1; /* recorded: complete */
    return OK;
}

EXPORT status aclrtQueryEventWaitStatus(void *event, int32_t *state)
{
    (void)event;
    *state = 0; /* waited for: complete */
    return OK;
}

#define SUCCEEDS(name, ...)         \
    EXPORT status name(__VA_ARGS__) \
    {                               \
        return OK;                  \
    }

/* clang-format off */
SUCCEEDS(aclrtSynchronizeStream, void)
SUCCEEDS(aclrtSynchronizeStreamWithTimeout, void)
SUCCEEDS(aclrtSynchronizeDevice, void)
SUCCEEDS(aclrtSynchronizeDeviceWithTimeout, void)
SUCCEEDS(aclrtSynchronizeEvent, void)
SUCCEEDS(aclrtRecordEvent, void)
SUCCEEDS(aclrtResetEvent, void)
SUCCEEDS(aclrtStreamWaitEvent, void)
SUCCEEDS(aclrtSetStreamFailureMode, void)
SUCCEEDS(aclrtSetStreamOverflowSwitch, void)
/* clang-format on */

/* Profiling hooks that are registered at start-up; no report is ever taken. */
EXPORT int32_t MsprofRegisterCallback(uint32_t module, void *callback)
{
    (void)module, (void)callback;
    return OK;
}

EXPORT uint64_t MsprofSysCycleTime(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
