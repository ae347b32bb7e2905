/* A disk that is watched, and fails on request, for tests: loaded before the C library, it sees what a process and all of
 * its libraries do to the files and folders whose paths contain a given text. It counts, records, kills and fails calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_long operations, left_until_death = -1, bytes_left = -1, delay_ms, failing_fsync;
static atomic_long held, left_until_failure = -1, failure, reads, left_until_bad_read = -1, bad_read;
static char watched[PATH_MAX] = "/checkpoints", deadly_call[32], deadly_path[PATH_MAX];
static int record_file = -1;
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER; /* so that records are in the order of what they record */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* ------------------------------------------------------------------------------------------------ for the test */

/* kill_after: the process dies at this operation, counted from 0; room: bytes that can still be written; delay: before
 * every write; fsync_errno: what fsync answers. -1, or 0 for the last two: never. */
void disk_arm(long kill_after, long room, long delay, long fsync_errno) {
    operations = 0;
    left_until_death = kill_after;
    bytes_left = room;
    delay_ms = delay;
    failing_fsync = fsync_errno;
    left_until_failure = left_until_bad_read = -1;
}

/* While it is not 0, writes wait. */
void disk_hold(long on) { held = on; }

/* The process dies at the first operation of this name on a path with this end. */
void disk_kill_at(const char *call, const char *path) {
    snprintf(deadly_call, sizeof deadly_call, "%s", call);
    snprintf(deadly_path, sizeof deadly_path, "%s", path);
}

/* The operation of this number, counted from now on, fails with this error number. */
void disk_fail(long number, long error) {
    operations = 0;
    left_until_failure = number;
    failure = error;
}

/* The read of this number, counted from now on, fails with this error number, or gives fewer bytes (-1), or a flipped
 * bit (-2). */
void disk_spoil_read(long number, long how) {
    reads = 0;
    left_until_bad_read = number;
    bad_read = how;
}

long disk_operations(void) { return operations; }
long disk_reads(void) { return reads; }

void disk_watch(const char *text) { snprintf(watched, sizeof watched, "%s", text); }

/* Appends every operation from now on to a file: a line of name, path, second path, offset and length, then the bytes. */
void disk_record(const char *path) {
    record_file = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void put(const void *data, size_t len) {
    while (len > 0) {
        long done = syscall(SYS_write, record_file, data, len);
        if (done < 0) _exit(97);
        data = (const char *)data + done;
        len -= (size_t)done;
    }
}

static void record(const char *name, const char *path, const char *to, long at, const void *data, size_t len) {
    char line[2 * PATH_MAX + 100];
    int size = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", name, path, to, at, len);
    if (record_file < 0) return;
    put(line, (size_t)size);
    if (len > 0) put(data, len);
}

/* A line that the test puts between the operations. */
void disk_mark(const char *text) {
    pthread_mutex_lock(&order);
    record("mark", text, "", 0, NULL, 0);
    pthread_mutex_unlock(&order);
}

/* --------------------------------------------------------------------------------------------------- in between */

static int ours(const char *path) { return path != NULL && strstr(path, watched) != NULL; }

static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t len = readlink(link, path, PATH_MAX - 1);
    path[len < 0 ? 0 : len] = 0;
    return len >= 0;
}

static int ours_fd(int file, char *path) { return path_of(file, path) && ours(path); }

static int ours_at(int folder, const char *name, char *path) {
    path[0] = 0;
    if (name[0] != '/' && folder != AT_FDCWD && path_of(folder, path)) strncat(path, "/", PATH_MAX - strlen(path) - 1);
    strncat(path, name, PATH_MAX - strlen(path) - 1);
    return ours(path);
}

static int is_deadly(const char *name, const char *path) {
    size_t size = strlen(path), end = strlen(deadly_path);
    return strcmp(name, deadly_call) == 0 && size >= end && strcmp(path + size - end, deadly_path) == 0;
}

/* Whether the operation is to be done; it is then ended by `after`. */
static int before(const char *name, const char *path) {
    pthread_mutex_lock(&order);
    operations++;
    if ((left_until_death >= 0 && left_until_death-- == 0) || is_deadly(name, path)) kill(getpid(), SIGKILL);
    if (left_until_failure < 0 || left_until_failure-- != 0) return 1;
    pthread_mutex_unlock(&order);
    errno = (int)failure;
    return 0;
}

static long after(long answer, const char *name, const char *path, const char *to, long at, const void *data) {
    int error = errno;
    if (answer >= 0) record(name, path, to, at, data, data == NULL ? 0 : (size_t)answer);
    pthread_mutex_unlock(&order);
    errno = error;
    return answer;
}

static ssize_t limited(const char *path, ssize_t (*real)(int, const void *, size_t, off_t), int file, const void *data,
                       size_t len, off_t at) {
    if (delay_ms > 0) {
        struct timespec pause = {delay_ms / 1000, delay_ms % 1000 * 1000000L};
        nanosleep(&pause, NULL);
    }
    while (held) nanosleep(&(struct timespec){0, 5000000}, NULL);
    if (!before("write", path)) return -1;
    ssize_t answer = -1;
    if (bytes_left >= 0 && atomic_fetch_sub(&bytes_left, (long)len) < (long)len) {
        bytes_left = 0;
        errno = ENOSPC;
    } else if (at >= 0) {
        answer = real(file, data, len, at);
    } else {
        int appends = fcntl(file, F_GETFL) & O_APPEND;
        at = lseek(file, 0, appends ? SEEK_END : SEEK_CUR);
        answer = REAL(write)(file, data, len);
    }
    return after(answer, "write", path, "", at, data);
}

ssize_t pwrite(int file, const void *data, size_t len, off_t at) {
    char path[PATH_MAX];
    return ours_fd(file, path) ? limited(path, REAL(pwrite), file, data, len, at) : REAL(pwrite)(file, data, len, at);
}

ssize_t pwrite64(int file, const void *data, size_t len, off64_t at) {
    char path[PATH_MAX];
    return ours_fd(file, path) ? limited(path, REAL(pwrite64), file, data, len, at)
                               : REAL(pwrite64)(file, data, len, at);
}

ssize_t write(int file, const void *data, size_t len) {
    char path[PATH_MAX];
    return ours_fd(file, path) ? limited(path, NULL, file, data, len, -1) : REAL(write)(file, data, len);
}

/* Whoever copies through the kernel copies through `write` instead. */
ssize_t sendfile(int out, int in, off_t *at, size_t len) {
    char path[PATH_MAX];
    if (!ours_fd(out, path)) return REAL(sendfile)(out, in, at, len);
    errno = EINVAL;
    return -1;
}

ssize_t sendfile64(int out, int in, off64_t *at, size_t len) { return sendfile(out, in, at, len); }

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t len, unsigned flags) {
    char path[PATH_MAX];
    if (!ours_fd(out, path)) return REAL(copy_file_range)(in, from, out, to, len, flags);
    errno = EINVAL;
    return -1;
}

static int sync_one(int (*real)(int), int file) {
    char path[PATH_MAX];
    struct stat facts;
    if (!ours_fd(file, path)) return real(file);
    const char *name = fstat(file, &facts) == 0 && S_ISDIR(facts.st_mode) ? "sync folder" : "sync";
    if (!before(name, path)) return -1;
    errno = (int)failing_fsync;
    return (int)after(failing_fsync ? -1 : real(file), name, path, "", 0, NULL);
}

int fsync(int file) { return sync_one(REAL(fsync), file); }
int fdatasync(int file) { return sync_one(REAL(fdatasync), file); }

int ftruncate64(int file, off64_t len) {
    char path[PATH_MAX];
    if (!ours_fd(file, path)) return REAL(ftruncate64)(file, len);
    if (!before("set size", path)) return -1;
    return (int)after(REAL(ftruncate64)(file, len), "set size", path, "", len, NULL);
}

int ftruncate(int file, off_t len) { return ftruncate64(file, len); }

int mkdir(const char *path, mode_t mode) {
    if (!ours(path)) return REAL(mkdir)(path, mode);
    if (!before("create folder", path)) return -1;
    return (int)after(REAL(mkdir)(path, mode), "create folder", path, "", 0, NULL);
}

int rename(const char *from, const char *to) {
    if (!ours(from)) return REAL(rename)(from, to);
    if (!before("rename", from)) return -1;
    return (int)after(REAL(rename)(from, to), "rename", from, to, 0, NULL);
}

int unlink(const char *path) {
    if (!ours(path)) return REAL(unlink)(path);
    if (!before("remove", path)) return -1;
    return (int)after(REAL(unlink)(path), "remove", path, "", 0, NULL);
}

int rmdir(const char *path) {
    if (!ours(path)) return REAL(rmdir)(path);
    if (!before("remove", path)) return -1;
    return (int)after(REAL(rmdir)(path), "remove", path, "", 0, NULL);
}

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!ours_at(folder, name, path)) return REAL(unlinkat)(folder, name, flags);
    if (!before("remove", path)) return -1;
    return (int)after(REAL(unlinkat)(folder, name, flags), "remove", path, "", 0, NULL);
}

static int open_one(int (*real)(int, const char *, int, ...), int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !ours_at(folder, name, path))
        return real(folder, name, flags, mode);
    struct stat facts;
    int there = fstatat(folder, name, &facts, 0) == 0;
    if (there && !(flags & O_TRUNC)) return real(folder, name, flags, mode);
    const char *call = there ? "set size" : "create";
    if (!before(call, path)) return -1;
    return (int)after(real(folder, name, flags, mode), call, path, "", 0, NULL);
}

#define MODE                                                                                                           \
    mode_t mode = 0;                                                                                                   \
    if (flags & O_CREAT) {                                                                                             \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }

int openat64(int folder, const char *path, int flags, ...) {
    MODE;
    return open_one(REAL(openat64), folder, path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
    MODE;
    return open_one(REAL(openat), folder, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE;
    return open_one(REAL(openat64), AT_FDCWD, path, flags, mode);
}

int open(const char *path, int flags, ...) {
    MODE;
    return open_one(REAL(openat), AT_FDCWD, path, flags, mode);
}

/* ------------------------------------------------------------------------------------------------------- reading */

/* How many bytes are asked for: 0 for an error. */
static size_t to_read(size_t len, int *flip) {
    reads++;
    *flip = 0;
    if (left_until_bad_read < 0 || left_until_bad_read-- != 0) return len;
    if (bad_read > 0) {
        errno = (int)bad_read;
        return 0;
    }
    *flip = bad_read == -2;
    return *flip ? len : (len + 1) / 2;
}

static ssize_t flipped(ssize_t answer, void *data, int flip) {
    if (flip && answer > 0) ((char *)data)[answer / 2] ^= 1;
    return answer;
}

ssize_t read(int file, void *data, size_t len) {
    char path[PATH_MAX];
    int flip;
    if (len == 0 || !ours_fd(file, path)) return REAL(read)(file, data, len);
    size_t wanted = to_read(len, &flip);
    return wanted == 0 ? -1 : flipped(REAL(read)(file, data, wanted), data, flip);
}

ssize_t preadv64v2(int file, const struct iovec *parts, int count, off64_t at, int flags) {
    char path[PATH_MAX];
    int flip;
    if (count != 1 || parts->iov_len == 0 || !ours_fd(file, path))
        return REAL(preadv64v2)(file, parts, count, at, flags);
    struct iovec part = *parts;
    part.iov_len = to_read(parts->iov_len, &flip);
    return part.iov_len == 0 ? -1 : flipped(REAL(preadv64v2)(file, &part, 1, at, flags), part.iov_base, flip);
}

ssize_t preadv64(int file, const struct iovec *parts, int count, off64_t at) {
    return preadv64v2(file, parts, count, at, 0);
}
