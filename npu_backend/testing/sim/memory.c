/* SPDX-License-Identifier: Apache-2.0
 *
 * Device memory of the stand-in: host memory with a capacity per device, a table of live ranges,
 * copies that check both ends, and physical blocks for expandable segments.
 */
#define _GNU_SOURCE
#include "standin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum kind { HEAP, RESERVED, MAPPED };

struct range {
    char *start;
    uint64_t size;
    int device;
    enum kind kind;
    struct block *block; /* of MAPPED ranges */
};

struct block { /* physical memory: capacity taken, an address only once it is mapped */
    uint64_t size;
    int device;
    int mapped;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static size_t live, room;
static uint64_t used[MAX_DEVICES];

uint64_t standin_used(int device)
{
    if (device < 0 || device >= MAX_DEVICES)
        return 0;
    pthread_mutex_lock(&lock);
    uint64_t bytes = used[device];
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* All helpers below expect the lock to be held. */

static int add(struct range entry)
{
    if (live == room) {
        size_t larger = room ? 2 * room : 64;
        struct range *moved = realloc(ranges, larger * sizeof *ranges);
        if (!moved)
            return 0;
        ranges = moved;
        room = larger;
    }
    ranges[live++] = entry;
    return 1;
}

static struct range *starting_at(const void *address, enum kind kind)
{
    for (size_t i = 0; i < live; i++)
        if (ranges[i].start == address && ranges[i].kind == kind)
            return &ranges[i];
    return NULL;
}

static void drop(struct range *entry)
{
    *entry = ranges[--live];
}

/* Neighbouring mapped ranges form one span, as they do for an expandable segment. */
static int is_device_memory(const void *address, size_t size)
{
    const char *at = address, *end = at + size;
    while (at < end) {
        const char *reached = NULL;
        for (size_t i = 0; i < live && !reached; i++)
            if (ranges[i].kind != RESERVED && at >= ranges[i].start &&
                at < ranges[i].start + ranges[i].size)
                reached = ranges[i].start + ranges[i].size;
        if (!reached)
            return 0;
        at = reached;
    }
    return 1;
}

static int take(int device, uint64_t size)
{
    if (size > standin_capacity() - used[device]) {
        standin_explain("device %d: %llu bytes asked for, %llu of %llu free", device,
                        (unsigned long long)size,
                        (unsigned long long)(standin_capacity() - used[device]),
                        (unsigned long long)standin_capacity());
        return 0;
    }
    used[device] += size;
    return 1;
}

static uint64_t rounded(uint64_t size)
{
    return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* ---- malloc and free --------------------------------------------------------------------- */

EXPORT status aclrtMalloc(void **out, size_t size, int policy)
{
    (void)policy;
    if (!out || size == 0 || size > UINT64_MAX - ALIGNMENT)
        return E_PARAM;
    uint64_t bytes = rounded(size);
    int device = standin_current_device();
    void *address = NULL;
    pthread_mutex_lock(&lock);
    status result = E_NO_MEMORY;
    if (take(device, bytes)) {
        if (posix_memalign(&address, ALIGNMENT, bytes) == 0 &&
            add((struct range){address, bytes, device, HEAP, NULL})) {
            *out = address;
            result = OK;
        } else {
            free(address);
            used[device] -= bytes;
            standin_explain("the host has no %llu bytes left for simulated device memory",
                            (unsigned long long)bytes);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT status aclrtMallocAlign32(void **out, size_t size, int policy)
{
    return aclrtMalloc(out, size, policy);
}

EXPORT status aclrtFree(void *address)
{
    pthread_mutex_lock(&lock);
    struct range *entry = starting_at(address, HEAP);
    if (entry) {
        used[entry->device] -= entry->size;
        drop(entry);
        free(address);
    } else {
        standin_explain("aclrtFree: %p is not a live device allocation", address);
    }
    pthread_mutex_unlock(&lock);
    return entry ? OK : E_PARAM;
}

EXPORT status aclrtMallocHost(void **out, size_t size)
{
    return posix_memalign(out, ALIGNMENT, rounded(size ? size : 1)) ? E_NO_MEMORY : OK;
}

EXPORT status aclrtMallocHostWithCfg(void **out, uint64_t size, void *config)
{
    (void)config;
    return aclrtMallocHost(out, (size_t)size);
}

EXPORT status aclrtFreeHost(void *address)
{
    free(address);
    return OK;
}

/* ---- copies ------------------------------------------------------------------------------ */

enum direction { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE };

EXPORT status aclrtMemcpy(void *to, size_t room_at_end, const void *from, size_t count, int kind)
{
    if (count == 0)
        return OK;
    if (count > room_at_end) {
        standin_explain("aclrtMemcpy: %zu bytes into room for %zu", count, room_at_end);
        return E_PARAM;
    }
    pthread_mutex_lock(&lock);
    const void *dead = NULL;
    if ((kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE) && !is_device_memory(to, count))
        dead = to;
    if ((kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE) && !is_device_memory(from, count))
        dead = from;
    pthread_mutex_unlock(&lock);
    if (dead) {
        standin_explain("aclrtMemcpy: %zu bytes at %p are not live device memory", count, dead);
        return E_PARAM;
    }
    memmove(to, from, count);
    return OK;
}

EXPORT status aclrtMemcpyAsync(void *to, size_t room_at_end, const void *from, size_t count,
                               int kind, void *stream)
{
    (void)stream;
    return aclrtMemcpy(to, room_at_end, from, count, kind);
}

EXPORT status aclrtMemcpyAsyncWithCondition(void *to, size_t room_at_end, const void *from,
                                            size_t count, int kind, void *stream)
{
    return aclrtMemcpyAsync(to, room_at_end, from, count, kind, stream);
}

EXPORT status aclrtMemset(void *address, size_t room_at_end, int32_t value, size_t count)
{
    if (count > room_at_end)
        return E_PARAM;
    pthread_mutex_lock(&lock);
    int alive = is_device_memory(address, count);
    pthread_mutex_unlock(&lock);
    if (!alive) {
        standin_explain("aclrtMemset: %zu bytes at %p are not live device memory", count, address);
        return E_PARAM;
    }
    memset(address, value, count);
    return OK;
}

EXPORT status aclrtMemsetAsync(void *address, size_t room_at_end, int32_t value, size_t count,
                               void *stream)
{
    (void)stream;
    return aclrtMemset(address, room_at_end, value, count);
}

/* ---- physical blocks and address ranges (expandable segments) ----------------------------- */

struct placement {
    int handle_type, allocation_type, attribute;
    struct {
        uint32_t id;
        int type;
    } location;
    uint64_t reserve;
};

EXPORT status aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *expected,
                                     uint64_t flags)
{
    (void)alignment, (void)expected, (void)flags;
    void *address =
        mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return E_NO_MEMORY;
    pthread_mutex_lock(&lock);
    int added = add((struct range){address, size, standin_current_device(), RESERVED, NULL});
    pthread_mutex_unlock(&lock);
    if (!added) {
        munmap(address, size);
        return E_NO_MEMORY;
    }
    *out = address;
    return OK;
}

EXPORT status aclrtReleaseMemAddress(void *address)
{
    pthread_mutex_lock(&lock);
    struct range *entry = starting_at(address, RESERVED);
    if (entry) {
        munmap(entry->start, entry->size);
        drop(entry);
    }
    pthread_mutex_unlock(&lock);
    return entry ? OK : E_PARAM;
}

EXPORT status aclrtMallocPhysical(void **handle, size_t size, const struct placement *where,
                                  uint64_t flags)
{
    (void)flags;
    int device = where ? (int)where->location.id : standin_current_device();
    if (device < 0 || device >= standin_device_count() || size == 0)
        return E_PARAM;
    struct block *block = malloc(sizeof *block);
    if (!block)
        return E_NO_MEMORY;
    *block = (struct block){size, device, 0};
    pthread_mutex_lock(&lock);
    int taken = take(device, size);
    pthread_mutex_unlock(&lock);
    if (!taken) {
        free(block);
        return E_NO_MEMORY;
    }
    *handle = block;
    return OK;
}

EXPORT status aclrtFreePhysical(void *handle)
{
    struct block *block = handle;
    pthread_mutex_lock(&lock);
    int held = block->mapped;
    if (!held)
        used[block->device] -= block->size;
    pthread_mutex_unlock(&lock);
    if (held) {
        standin_explain("aclrtFreePhysical: the block is still mapped");
        return E_PARAM;
    }
    free(block);
    return OK;
}

EXPORT status aclrtMapMem(void *address, size_t size, size_t offset, void *handle, uint64_t flags)
{
    (void)flags;
    struct block *block = handle;
    status result = E_PARAM;
    pthread_mutex_lock(&lock);
    /* One mapping per block: two would have to share contents, which anonymous memory cannot. */
    if (!block->mapped && offset == 0 && size <= block->size &&
        mprotect(address, size, PROT_READ | PROT_WRITE) == 0 &&
        add((struct range){address, size, block->device, MAPPED, block})) {
        block->mapped = 1;
        result = OK;
    }
    pthread_mutex_unlock(&lock);
    if (result != OK)
        standin_explain("aclrtMapMem: a block is mapped once, whole, inside a reserved range");
    return result;
}

EXPORT status aclrtUnmapMem(void *address)
{
    pthread_mutex_lock(&lock);
    struct range *entry = starting_at(address, MAPPED);
    if (entry) {
        entry->block->mapped = 0;
        /* Fresh pages without access: what was there is gone, as on the device. */
        mmap(address, entry->size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        drop(entry);
    }
    pthread_mutex_unlock(&lock);
    return entry ? OK : E_PARAM;
}
