/* Preloaded into a test's process: its wall clock is ahead by the seconds (a 64-bit integer) at the start of the file
 * named by WALL_CLOCK, as they are at each moment. No other clock is touched, which is what settimeofday would do.
 *
 * A wait until a moment of the wall clock is the kernel's, whose clock nobody set: its moment is moved back. Waits that
 * are under way when the clock is set end when they would have; on a real machine they would end early or late. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *ahead_s;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("WALL_CLOCK");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    void *shared = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (shared != MAP_FAILED)
        ahead_s = shared;
}

static int64_t ahead(void)
{
    return ahead_s == NULL ? 0 : *ahead_s;
}

static long (*real_syscall(void))(long, ...)
{
    static long (*found)(long, ...);
    if (found == NULL)
        *(void **)&found = dlsym(RTLD_NEXT, "syscall");
    return found;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)real_syscall()(SYS_clock_gettime, clock, now);
    if (failed == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0)
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL)
        *out = now.tv_sec;
    return now.tv_sec;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    static int (*found)(sem_t *, const struct timespec *);
    struct timespec moved = *until;
    if (found == NULL)
        *(void **)&found = dlsym(RTLD_NEXT, "sem_timedwait");
    moved.tv_sec -= ahead();
    return found(semaphore, &moved);
}

/* gRPC waits on futexes, and calls them by their number. */
long syscall(long number, ...)
{
    long a[6];
    va_list given;
    struct timespec moved;
    va_start(given, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(given, long);
    va_end(given);
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3] != 0) {
        moved = *(const struct timespec *)a[3];
        moved.tv_sec -= ahead();
        a[3] = (long)&moved;
    }
    return real_syscall()(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
