// Prints how many nanoseconds a cache line takes from one core to another and back: pingpong FIRST_CORE SECOND_CORE
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define TIMED 100       // the fastest counts: others may run on the cores, too
#define EXCHANGES 1000  // timed together

static _Atomic int line __attribute__((aligned(128)));
static int second_core;

static void bind_to(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    if (pthread_setaffinity_np(pthread_self(), sizeof cores, &cores)) exit(1);
}

static void await(int value) {
    while (atomic_load_explicit(&line, memory_order_acquire) != value) {}
}

static void write_value(int value) { atomic_store_explicit(&line, value, memory_order_release); }

static void *answer(void *unused) {
    bind_to(second_core);
    for (int exchange = 0; exchange < TIMED * EXCHANGES; exchange++) {
        await(2 * exchange + 1);
        write_value(2 * exchange + 2);
    }
    return unused;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    second_core = atoi(arguments[2]);
    bind_to(atoi(arguments[1]));
    pthread_t other;
    if (pthread_create(&other, NULL, answer, NULL)) return 1;
    double fastest = 1e18;
    for (int timed = 0, exchange = 0; timed < TIMED; timed++) {
        double began = now();
        for (int i = 0; i < EXCHANGES; i++, exchange++) {
            write_value(2 * exchange + 1);
            await(2 * exchange + 2);
        }
        double nanoseconds = (now() - began) / EXCHANGES;
        if (nanoseconds < fastest) fastest = nanoseconds;
    }
    printf("%.0f\n", fastest);
    return 0;
}
