/* The wall clock of this process, shifted by the seconds in a file, also where waits
   have a deadline by it. The kernel's own clock is shared with the whole machine. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *shift;

__attribute__((constructor)) static void open_shift(void) {
  static const long none = 0;
  const char *path = getenv("SHIFT_FILE");
  int fd = path ? open(path, O_RDONLY) : -1;
  void *page = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
  shift = page == MAP_FAILED ? &none : page;
  if (fd >= 0) close(fd);
}

static long seconds(void) { return shift ? *shift : 0; }

int clock_gettime(clockid_t id, struct timespec *now) {
  int code = (int)syscall(SYS_clock_gettime, id, now);
  if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds();
  return code;
}

int gettimeofday(struct timeval *now, void *zone) {
  (void)zone;
  struct timespec found;
  int code = clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return code;
}

time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}

static struct timespec unshifted(const struct timespec *until) {
  struct timespec real = *until;
  real.tv_sec -= seconds();
  return real;
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
  /* What waits by the monotonic clock calls pthread_cond_clockwait. */
  static int (*next)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
  struct timespec real = unshifted(until);
  return next(c, m, CLOCK_REALTIME, &real);
}

int sem_timedwait(sem_t *s, const struct timespec *until) {
  static int (*next)(sem_t *, const struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec real = unshifted(until);
  return next(s, &real);
}

long syscall(long number, ...) {
  static long (*next)(long, ...);
  if (!next) next = dlsym(RTLD_NEXT, "syscall");
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  struct timespec real;
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
    real = unshifted((const struct timespec *)a[3]);
    a[3] = (long)&real;
  }
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
