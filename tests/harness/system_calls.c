/* Stand between a program and the C library: count, fail, tear and record the calls that change files.

   Loaded with LD_PRELOAD. Only files below a watched directory are concerned; nothing happens before calls_watch().
   A plan concerns one call: the k-th of those that it names, counted from calls_arm(). With a journal, calls that
   change files take turns, and each one that succeeded is written to the journal with its data. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Bits of the calls that a plan names; system_calls.py has the same table. */
enum { OPEN = 1, WRITE = 2, SYNC = 4, RENAME = 8, LINK = 16, UNLINK = 32, TRUNCATE = 64, ALLOCATE = 128, MKDIR = 256 };
enum { NO_ACTION, FAIL, SHORTEN, KILL_BEFORE, KILL_AFTER, TEAR };
enum { GO, FAILED, SHORTENED, KILLED_AFTER, TORN };

/* Kinds of a record; replaying.py has the same table. */
enum { R_OPEN, R_WRITE, R_TRUNCATE, R_ALLOCATE, R_SYNC, R_SYNC_NAMES, R_RENAME, R_LINK, R_UNLINK, R_MKDIR, R_NOTE };

struct record {
    uint32_t kind, flags;
    uint64_t inode;
    int64_t offset;
    uint64_t size;
    uint32_t path_bytes, other_bytes;
};

static char root[PATH_MAX];
static size_t root_bytes;
static int journal = -1;
static int syncs_lie;
static atomic_long calls[9], left = -1; /* calls of each kind */
static atomic_int fired;
static int action, error_number;
static unsigned mask;
static atomic_uint refused_calls;
static atomic_int refused_error;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

void calls_watch(const char *directory, int journal_fd) {
    snprintf(root, sizeof root, "%s", directory);
    root_bytes = strlen(root);
    journal = journal_fd;
    for (int i = 0; i < 9; i++) calls[i] = 0;
}

void calls_arm(long number, int what, int error, unsigned which) {
    action = what, error_number = error, mask = which, fired = 0;
    left = number;
}

void calls_refuse(unsigned which, int error) { refused_error = error; refused_calls = which; }

long calls_count(unsigned which) {
    long total = 0;
    for (int i = 0; i < 9; i++) total += which >> i & 1 ? calls[i] : 0;
    return total;
}
int calls_fired(void) { return fired; }
void calls_lie(int lie) { syncs_lie = lie; }

static void *next_of(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}
#define NEXT(name) ({ static void *found; if (!found) found = next_of(#name); (__typeof__(&name))found; })

static int is_below(const char *path) {
    return root_bytes && path && !strncmp(path, root, root_bytes) && (path[root_bytes] == '/' || !path[root_bytes]);
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size > 0 ? size : 0] = 0;
    return size > 0;
}

static int is_fd_below(int fd) {
    char path[PATH_MAX];
    return root_bytes && path_of(fd, path) && is_below(path);
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static int strike(unsigned call) {
    calls[__builtin_ctz(call)]++;
    if (refused_calls & call) { errno = refused_error; return FAILED; }
    if (left < 0 || !(mask & call) || --left != 0) return GO;
    fired = 1;
    left = -1;
    if (action == KILL_BEFORE) die();
    if (action == FAIL) { errno = error_number; return FAILED; }
    if (action == KILL_AFTER) return KILLED_AFTER;
    if (action == SHORTEN && call == WRITE) return SHORTENED;
    if (action == TEAR) { if (call == WRITE) return TORN; die(); }
    return GO;
}

static void put(const void *data, size_t size) {
    while (size) {
        long done = syscall(SYS_write, journal, data, size);
        if (done <= 0) abort();
        data = (const char *)data + done, size -= done;
    }
}

static void note(int kind, unsigned flags, uint64_t inode, int64_t offset, const char *path, const char *other,
                 const void *data, size_t size) {
    int saved = errno;
    struct record r = {kind, flags, inode, offset, size, path ? strlen(path) : 0, other ? strlen(other) : 0};
    put(&r, sizeof r);
    put(path, r.path_bytes);
    put(other, r.other_bytes);
    if (data) put(data, size);
    errno = saved;
}

void calls_note(const void *data, size_t size) {
    pthread_mutex_lock(&turn);
    if (journal >= 0) note(R_NOTE, 0, 0, 0, NULL, NULL, data, size);
    pthread_mutex_unlock(&turn);
}

static void begin(void) { if (journal >= 0) pthread_mutex_lock(&turn); }
static void end(int fate) {
    if (journal >= 0) pthread_mutex_unlock(&turn);
    if (fate == KILLED_AFTER) die();
}

static uint64_t inode_of(int fd, mode_t *mode) {
    struct stat status;
    if (fstat(fd, &status)) return 0;
    if (mode) *mode = status.st_mode;
    return status.st_ino;
}

/* -- names -- */

static int open_below(int (*next)(const char *, int, ...), const char *path, int flags, mode_t mode) {
    int fate = flags & (O_CREAT | O_WRONLY | O_RDWR) ? strike(OPEN) : GO;
    if (fate == FAILED) return -1;
    begin();
    struct stat before;
    int existed = !lstat(path, &before);
    errno = 0;
    int fd = next(path, flags, mode);
    mode_t kind = 0;
    if (fd >= 0 && journal >= 0) {
        uint64_t inode = inode_of(fd, &kind);
        if (S_ISREG(kind)) {
            if ((flags & O_TMPFILE) == O_TMPFILE) note(R_OPEN, 0, inode, 0, NULL, NULL, NULL, 0);
            else if (!existed) note(R_OPEN, 0, inode, 0, path, NULL, NULL, 0);
            else if (flags & O_TRUNC) note(R_TRUNCATE, 0, inode, 0, NULL, NULL, NULL, 0);
        }
    }
    end(fate);
    return fd;
}

#define OPEN_CALL(name)                                                                    \
    int name(const char *path, int flags, ...) {                                           \
        mode_t mode = 0;                                                                   \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                             \
            va_list rest;                                                                  \
            va_start(rest, flags);                                                         \
            mode = va_arg(rest, mode_t);                                                   \
            va_end(rest);                                                                  \
        }                                                                                  \
        if (!is_below(path)) return NEXT(name)(path, flags, mode);                         \
        return open_below(NEXT(name), path, flags, mode);                                  \
    }
OPEN_CALL(open)
OPEN_CALL(open64)

#define TWO_NAMES(name, call, record)                                                      \
    int name(const char *from, const char *to) {                                           \
        if (!is_below(from) && !is_below(to)) return NEXT(name)(from, to);                 \
        int fate = strike(call);                                                           \
        if (fate == FAILED) return -1;                                                     \
        begin();                                                                           \
        int result = NEXT(name)(from, to);                                                 \
        if (!result && journal >= 0) note(record, 0, 0, 0, from, to, NULL, 0);             \
        end(fate);                                                                         \
        return result;                                                                     \
    }
TWO_NAMES(rename, RENAME, R_RENAME)
TWO_NAMES(link, LINK, R_LINK)

int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags) {
    if (!is_below(from) && !is_below(to)) return NEXT(linkat)(from_fd, from, to_fd, to, flags);
    int fate = strike(LINK);
    if (fate == FAILED) return -1;
    begin();
    int result = NEXT(linkat)(from_fd, from, to_fd, to, flags);
    if (!result && journal >= 0) note(R_LINK, 0, 0, 0, from, to, NULL, 0);
    end(fate);
    return result;
}

#define ONE_NAME(name, record)                                                             \
    int name(const char *path) {                                                           \
        if (!is_below(path)) return NEXT(name)(path);                                      \
        int fate = strike(UNLINK);                                                         \
        if (fate == FAILED) return -1;                                                     \
        begin();                                                                           \
        int result = NEXT(name)(path);                                                     \
        if (!result && journal >= 0) note(record, 0, 0, 0, path, NULL, NULL, 0);           \
        end(fate);                                                                         \
        return result;                                                                     \
    }
ONE_NAME(unlink, R_UNLINK)
ONE_NAME(rmdir, R_UNLINK)

int unlinkat(int at, const char *name, int flags) { /* as shutil.rmtree removes a tree */
    char path[2 * PATH_MAX] = "";
    if (root_bytes && at != AT_FDCWD && name[0] != '/' && path_of(at, path)) strcat(path, "/");
    strncat(path, name, PATH_MAX - 1);
    if (!is_below(path)) return NEXT(unlinkat)(at, name, flags);
    int fate = strike(UNLINK);
    if (fate == FAILED) return -1;
    begin();
    int result = NEXT(unlinkat)(at, name, flags);
    if (!result && journal >= 0) note(R_UNLINK, 0, 0, 0, path, NULL, NULL, 0);
    end(fate);
    return result;
}

int mkdir(const char *path, mode_t mode) {
    if (!is_below(path)) return NEXT(mkdir)(path, mode);
    int fate = strike(MKDIR);
    if (fate == FAILED) return -1;
    begin();
    int result = NEXT(mkdir)(path, mode);
    if (!result && journal >= 0) note(R_MKDIR, 0, 0, 0, path, NULL, NULL, 0);
    end(fate);
    return result;
}

/* -- bytes -- */

static int is_synchronous(int fd) { return !!(fcntl(fd, F_GETFL) & O_DSYNC); }

static void note_bytes(int fd, off_t offset, const void *data, ssize_t size) {
    if (journal >= 0 && size > 0) note(R_WRITE, is_synchronous(fd), inode_of(fd, NULL), offset, NULL, NULL, data, size);
}

static size_t part_of(size_t size) { return size > 8192 ? size / 2 / 4096 * 4096 : size > 1 ? size / 2 : size; }

static ssize_t write_below(int fd, const void *data, size_t size, off_t offset, int is_placed) {
    ssize_t (*at)(int, const void *, size_t, off_t) = NEXT(pwrite);
    ssize_t (*here)(int, const void *, size_t) = NEXT(write);
    int fate = strike(WRITE);
    if (fate == FAILED) return -1;
    if (fate == SHORTENED || fate == TORN) size = part_of(size);
    begin();
    if (!is_placed && journal >= 0) {
        struct stat status;
        offset = fcntl(fd, F_GETFL) & O_APPEND && !fstat(fd, &status) ? status.st_size : lseek(fd, 0, SEEK_CUR);
    }
    ssize_t result = is_placed ? at(fd, data, size, offset) : here(fd, data, size);
    note_bytes(fd, offset, data, result);
    end(fate);
    if (fate == TORN) die();
    return result;
}

ssize_t write(int fd, const void *data, size_t size) {
    return is_fd_below(fd) ? write_below(fd, data, size, 0, 0) : NEXT(write)(fd, data, size);
}

#define PLACED_WRITE(name)                                                                 \
    ssize_t name(int fd, const void *data, size_t size, off_t offset) {                    \
        return is_fd_below(fd) ? write_below(fd, data, size, offset, 1) : NEXT(name)(fd, data, size, offset); \
    }
PLACED_WRITE(pwrite)
PLACED_WRITE(pwrite64)

static ssize_t vector_below(int fd, const struct iovec *parts, int count, off_t offset, int is_placed) {
    ssize_t total = 0;
    for (int i = 0; i < count; i++) total += parts[i].iov_len;
    char *joined = NULL;
    if (posix_memalign((void **)&joined, 4096, total ? total : 1)) abort();
    total = 0;
    for (int i = 0; i < count; i++) {
        memcpy(joined + total, parts[i].iov_base, parts[i].iov_len);
        total += parts[i].iov_len;
    }
    ssize_t result = write_below(fd, joined, total, offset, is_placed);
    int saved = errno;
    free(joined);
    errno = saved;
    return result;
}

#define PLACED_VECTOR(name)                                                                \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) {             \
        return is_fd_below(fd) ? vector_below(fd, parts, count, offset, 1) : NEXT(name)(fd, parts, count, offset); \
    }
PLACED_VECTOR(pwritev)
PLACED_VECTOR(pwritev64)

#define FLAGGED_VECTOR(name)                                                               \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) {  \
        if (!is_fd_below(fd)) return NEXT(name)(fd, parts, count, offset, flags);          \
        return vector_below(fd, parts, count, offset, offset != -1);                       \
    }
FLAGGED_VECTOR(pwritev2)
FLAGGED_VECTOR(pwritev64v2)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    return is_fd_below(fd) ? vector_below(fd, parts, count, 0, 0) : NEXT(writev)(fd, parts, count);
}

static int sync_below(int (*next)(int), int fd) {
    int fate = strike(SYNC);
    if (fate == FAILED) return -1;
    begin();
    int result = next(fd);
    if (!result && journal >= 0 && !syncs_lie) {
        char path[PATH_MAX];
        mode_t mode = 0;
        uint64_t inode = inode_of(fd, &mode);
        path_of(fd, path);
        note(S_ISDIR(mode) ? R_SYNC_NAMES : R_SYNC, 0, inode, 0, path, NULL, NULL, 0);
    }
    end(fate);
    return result;
}

#define SYNC_CALL(name)                                                                    \
    int name(int fd) { return is_fd_below(fd) ? sync_below(NEXT(name), fd) : NEXT(name)(fd); }
SYNC_CALL(fsync)
SYNC_CALL(fdatasync)

#define SIZE_CALL(name)                                                                    \
    int name(int fd, off_t size) {                                                         \
        if (!is_fd_below(fd)) return NEXT(name)(fd, size);                                 \
        int fate = strike(TRUNCATE);                                                       \
        if (fate == FAILED) return -1;                                                     \
        begin();                                                                           \
        int result = NEXT(name)(fd, size);                                                 \
        if (!result && journal >= 0) note(R_TRUNCATE, 0, inode_of(fd, NULL), size, NULL, NULL, NULL, 0); \
        end(fate);                                                                         \
        return result;                                                                     \
    }
SIZE_CALL(ftruncate)
SIZE_CALL(ftruncate64)

#define SIZE_OF_NAME_CALL(name)                                                            \
    int name(const char *path, off_t size) {                                               \
        if (!is_below(path)) return NEXT(name)(path, size);                                \
        int fate = strike(TRUNCATE);                                                       \
        if (fate == FAILED) return -1;                                                     \
        begin();                                                                           \
        int result = NEXT(name)(path, size);                                               \
        struct stat status;                                                                \
        if (!result && journal >= 0 && !stat(path, &status))                               \
            note(R_TRUNCATE, 0, status.st_ino, size, NULL, NULL, NULL, 0);                 \
        end(fate);                                                                         \
        return result;                                                                     \
    }
SIZE_OF_NAME_CALL(truncate)
SIZE_OF_NAME_CALL(truncate64)

#define ALLOCATE_CALL(name)                                                                \
    int name(int fd, off_t offset, off_t size) {                                           \
        if (!is_fd_below(fd)) return NEXT(name)(fd, offset, size);                         \
        int fate = strike(ALLOCATE);                                                       \
        if (fate == FAILED) return errno;                                                  \
        begin();                                                                           \
        int result = NEXT(name)(fd, offset, size);                                         \
        if (!result && journal >= 0) note(R_ALLOCATE, 0, inode_of(fd, NULL), offset + size, NULL, NULL, NULL, 0); \
        end(fate);                                                                         \
        return result;                                                                     \
    }
ALLOCATE_CALL(posix_fallocate)
ALLOCATE_CALL(posix_fallocate64)
