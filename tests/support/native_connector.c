/* A native connector for the tests: six operations, and a seventh, over files in one directory.
 *
 * One worker thread, one queue, one eventfd. Submitting never waits for the disk. A block is written to a file of another name and
 * renamed, so that it exists only once it is whole. What is complete is queued first and signalled then.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { GET, SET, EXISTS, DELETE };

struct job {
    struct job *next;
    int64_t id;
    int kind, n, ok;
    char **keys;
    void **buffers; /* the caller keeps them alive until the job is complete */
    size_t size;
    unsigned char *bits;
};

struct connector {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct job *first, **last, *done, **done_last;
    int64_t ids;
    int fd, closing;
    char directory[512];
};

static void path_of(struct connector *c, const char *key, const char *suffix, char *path, size_t n) {
    snprintf(path, n, "%s/%s%s", c->directory, key, suffix);
}

static int transfer(int fd, char *at, size_t left, int writing) {
    while (left) {
        ssize_t n = writing ? write(fd, at, left) : read(fd, at, left);
        if (n <= 0) return 0;
        at += n, left -= (size_t)n;
    }
    return 1;
}

static int one(struct connector *c, struct job *job, int at) {
    char path[1024], other[1024];
    path_of(c, job->keys[at], "", path, sizeof path);
    if (job->kind == EXISTS) return access(path, F_OK) == 0;
    if (job->kind == DELETE) return unlink(path) == 0;
    if (job->kind == SET) path_of(c, job->keys[at], ".new", other, sizeof other);
    int fd = job->kind == SET ? open(other, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    int good = transfer(fd, job->buffers[at], job->size, job->kind == SET);
    close(fd);
    return job->kind == SET ? good && rename(other, path) == 0 : good;
}

static void *run(void *arg) {
    struct connector *c = arg;
    for (;;) {
        pthread_mutex_lock(&c->lock);
        while (!c->first && !c->closing) pthread_cond_wait(&c->work, &c->lock);
        struct job *job = c->first;
        if (!job) {
            pthread_mutex_unlock(&c->lock);
            return NULL;
        }
        if (!(c->first = job->next)) c->last = &c->first;
        pthread_mutex_unlock(&c->lock);
        job->ok = 1;
        for (int at = 0; at < job->n; at++) {
            job->bits[at] = (unsigned char)one(c, job, at);
            if (job->kind == SET && !job->bits[at]) job->ok = 0; /* a set fails as a whole */
        }
        job->next = NULL;
        pthread_mutex_lock(&c->lock);
        *c->done_last = job;
        c->done_last = &job->next;
        pthread_mutex_unlock(&c->lock);
        uint64_t one_more = 1;
        if (write(c->fd, &one_more, sizeof one_more) < 0) perror("eventfd");
    }
}

struct connector *nc_open(const char *directory) {
    struct connector *c = calloc(1, sizeof *c);
    snprintf(c->directory, sizeof c->directory, "%s", directory);
    c->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    c->last = &c->first;
    c->done_last = &c->done;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->work, NULL);
    pthread_create(&c->thread, NULL, run, c);
    return c;
}

int nc_event_fd(struct connector *c) { return c->fd; }

int64_t nc_submit(struct connector *c, int kind, int n, const char **keys, void **buffers, size_t size) {
    struct job *job = calloc(1, sizeof *job);
    job->kind = kind, job->n = n, job->size = size;
    job->keys = calloc((size_t)n, sizeof *job->keys);
    job->buffers = calloc((size_t)n, sizeof *job->buffers);
    job->bits = calloc((size_t)n, 1);
    for (int at = 0; at < n; at++) {
        job->keys[at] = strdup(keys[at]);
        if (buffers) job->buffers[at] = buffers[at];
    }
    pthread_mutex_lock(&c->lock);
    int64_t id = job->id = ++c->ids;
    *c->last = job;
    c->last = &job->next;
    pthread_cond_signal(&c->work);
    pthread_mutex_unlock(&c->lock);
    return id;
}

/* One completion, or 0. The first call of a drain resets the descriptor. */
int nc_drain(struct connector *c, int first, int64_t *id, int *kind, int *ok, int *n, unsigned char *bits, int room) {
    uint64_t count;
    if (first && read(c->fd, &count, sizeof count) < 0) { /* nothing was signalled */
    }
    pthread_mutex_lock(&c->lock);
    struct job *job = c->done;
    if (job && !(c->done = job->next)) c->done_last = &c->done;
    pthread_mutex_unlock(&c->lock);
    if (!job) return 0;
    *id = job->id, *kind = job->kind, *ok = job->ok, *n = job->n;
    memcpy(bits, job->bits, (size_t)(job->n < room ? job->n : room));
    for (int at = 0; at < job->n; at++) free(job->keys[at]);
    free(job->keys), free(job->buffers), free(job->bits), free(job);
    return 1;
}

void nc_close(struct connector *c) {
    pthread_mutex_lock(&c->lock);
    c->closing = 1;
    pthread_cond_signal(&c->work);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL); /* what was submitted is done first */
    close(c->fd);
    free(c);
}
