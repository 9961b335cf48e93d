/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared declarations of the stand-in for CANN's runtime libraries.
 *
 * One library holds all code; the other SONAMEs are empty libraries that depend on it. "Device
 * memory" is host memory with a capacity, streams are synchronous, events are always complete.
 * What is not simulated answers with an error and leaves its name for aclGetRecentErrMsg.
 *
 * Plain C11 and POSIX only: the hosts of these chips are mostly aarch64.
 */
#ifndef NPU_BACKEND_STANDIN_H
#define NPU_BACKEND_STANDIN_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Error numbers as the runtime documents them; torch_npu turns them into its own messages. */
enum {
    OK = 0,
    E_PARAM = 107000,
    E_DEVICE = 107001,
    /* "API not supported". The runtime's "feature not supported" (207000) would be the nearer name,
     * but torch_npu only warns about that one and goes on. */
    E_UNSUPPORTED = 200001,
    E_NO_MEMORY = 207001,
};

enum { MAX_DEVICES = 16, ALIGNMENT = 512 };

typedef int32_t status;

/* device.c */
int standin_current_device(void);
int standin_device_count(void);
uint64_t standin_capacity(void);
void standin_explain(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Record that `name` was called although it is not simulated; always returns E_UNSUPPORTED. */
status standin_refuse(const char *name);

/* memory.c */
uint64_t standin_used(int device);

#endif
