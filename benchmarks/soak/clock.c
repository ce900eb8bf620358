/* A host's clock of the wall: this machine's and the seconds that the file $CLOCK_AHEAD holds.

It is loaded before the C library (LD_PRELOAD). As with the kernel's, who waits until a time of this
clock waits shorter or longer if it jumps meanwhile. The monotonic clock never jumps. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

enum { SECOND = 1000000000, SLICE = SECOND / 20 }; /* nanoseconds */
static const volatile long *ahead = &(const long){0};
static int (*real)(clockid_t, struct timespec *);
static int (*until)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

__attribute__((constructor)) static void begin(void) {
    void *page = mmap(0, 8, PROT_READ, MAP_SHARED, open(getenv("CLOCK_AHEAD"), O_RDONLY | O_CLOEXEC), 0);
    if (page != MAP_FAILED) ahead = page;
    real = dlsym(RTLD_NEXT, "clock_gettime");
    until = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int error = real ? real(clock, now) : syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += *ahead;
    return error;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    *now = (struct timeval){time.tv_sec, time.tv_nsec / 1000};
    return 0;
}

/* Whoever waits on looks every SLICE, as after any wake-up that nobody meant. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end) {
    if (end->tv_sec < SECOND) return until(condition, mutex, end); /* of the monotonic clock */
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    long left = (end->tv_sec - now.tv_sec) * SECOND + end->tv_nsec - now.tv_nsec;
    long nsec = now.tv_nsec + (left < 0 ? 0 : left < SLICE ? left : SLICE);
    now = (struct timespec){now.tv_sec - *ahead + nsec / SECOND, nsec % SECOND};
    int error = until(condition, mutex, &now);
    return error == ETIMEDOUT && left > SLICE ? 0 : error;
}
