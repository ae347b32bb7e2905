/* A disk that fails on request, for tests: loaded before the C library, it sees what a process does to files below
 * folders named `checkpoints`. Armed by `disk_arm`; otherwise it only counts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static atomic_long operations, left_until_death = -1, bytes_left = -1, delay_ms, failing_fsync;

/* kill_after: the process dies at this operation, counted from 0; room: bytes that can still be written; delay: before
 * every write; fsync_errno: what fsync answers. -1, or 0 for the last two: never. */
void disk_arm(long kill_after, long room, long delay, long fsync_errno) {
    operations = 0;
    left_until_death = kill_after;
    bytes_left = room;
    delay_ms = delay;
    failing_fsync = fsync_errno;
}

long disk_operations(void) { return operations; }

static int ours(const char *path) { return strstr(path, "/checkpoints") != NULL; }

static int ours_fd(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t len = readlink(link, path, sizeof path - 1);
    if (len < 0) return 0;
    path[len] = 0;
    return ours(path);
}

static void count(void) {
    operations++;
    if (left_until_death >= 0 && left_until_death-- == 0) kill(getpid(), SIGKILL);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static ssize_t limited(ssize_t (*real)(int, const void *, size_t, off_t), int file, const void *data, size_t len,
                       off_t at) {
    if (!ours_fd(file)) return real(file, data, len, at);
    count();
    if (delay_ms > 0) {
        struct timespec pause = {delay_ms / 1000, delay_ms % 1000 * 1000000L};
        nanosleep(&pause, NULL);
    }
    if (bytes_left >= 0) {
        long before = atomic_fetch_sub(&bytes_left, (long)len);
        if (before < (long)len) {
            bytes_left = 0;
            errno = ENOSPC;
            return -1;
        }
    }
    return real(file, data, len, at);
}

ssize_t pwrite(int file, const void *data, size_t len, off_t at) { return limited(REAL(pwrite), file, data, len, at); }

ssize_t pwrite64(int file, const void *data, size_t len, off64_t at) {
    return limited(REAL(pwrite64), file, data, len, at);
}

int fsync(int file) {
    if (ours_fd(file)) {
        count();
        if (failing_fsync) {
            errno = (int)failing_fsync;
            return -1;
        }
    }
    return REAL(fsync)(file);
}

int ftruncate64(int file, off64_t len) {
    if (ours_fd(file)) count();
    return REAL(ftruncate64)(file, len);
}

int mkdir(const char *path, mode_t mode) {
    if (ours(path)) count();
    return REAL(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    if (ours(from)) count();
    return REAL(rename)(from, to);
}

int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & O_CREAT) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
        if (ours(path)) count();
    }
    return REAL(open64)(path, flags, mode);
}
