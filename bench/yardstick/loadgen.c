// A closed-loop HTTP/1.1 keep-alive load generator that understands server-sent events. One thread, epoll; sends to
// 127.0.0.1 only.
//
//   loadgen -p port -b bodyfile [-P path] [-c connections] [-d seconds] [-n requests] [-s] [-h 'K: V']... [-T
//   timeout_s]
//           [-g us between the starts of connections]
//
// Each connection sends the next request when the last one is answered, until -d seconds are over or -n requests were
// sent; requests that run then are finished, for at most -T seconds more. -s: answers are streams; the content of a
// token that is a number is the CLOCK_MONOTONIC ns at which the mock engine wrote it.
//
// One JSON object on stdout; latencies in microseconds, over answers of status 200 only:
//   ok non200 errors unfinished truncated_streams reconnects elapsed_s rps events tokens events_per_s bytes lg_cpu_s
//   first_error latency_us ttft_us transit_us itl_us {n mean min p50 p90 p95 p99 p999 max}
//
// Bounds: 7200 s, 4096 connections, a body of 4 MiB, response heads of 8 KiB, 20,000 errors. Samples take 4 bytes each.
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
typedef struct {
  uint32_t *v;
  size_t n, cap;
} arr;
static void add(arr *a, uint64_t ns) {
  if (a->n == a->cap) {
    a->cap = a->cap ? a->cap * 2 : 4096;
    a->v = realloc(a->v, a->cap * 4);
  }
  uint64_t u = ns / 100;
  a->v[a->n++] = u > 0xffffffffu ? 0xffffffffu : u;
}
static int cmp(const void *a, const void *b) {
  uint32_t x = *(uint32_t *)a, y = *(uint32_t *)b;
  return x < y ? -1 : x > y;
}
enum { CONNECTING, HEAD, BODY_LEN, BODY_CHUNK, BODY_EOF, IDLE };
typedef struct {
  int fd, st, close, code, cst, first, events, done;
  uint64_t t0, tlast;
  size_t left;
  char h[8192];
  size_t hl;
  char line[8192];
  size_t ll;
  char cl[32];
  int cll;
  size_t woff;
  int newconn;
} conn;
static arr lat, ttft, transit, itl;
static uint64_t events, tokens, bytes, non200, errs, shortst, reconn, done_;
static int codes[600];
static int ep, port = 0, stream = 0, conc = 1;
static char *req;
static size_t reqlen;
static double secs = 3, tmo = 30;
static uint64_t maxreq = 0, issued = 0, tend, stag = 0;
static conn *C;
static int active;
static char lasterr[300];
static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
static void mod(conn *c, int ev, int op) {
  struct epoll_event e = {ev, {.ptr = c}};
  epoll_ctl(ep, op, c->fd, &e);
}
static int open_(conn *c) {
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int one = 1;
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(c->fd, (void *)&a, sizeof a) && errno != EINPROGRESS) {
    close(c->fd);
    c->fd = -1;
    return -1;
  }
  c->st = CONNECTING;
  c->newconn = 1;
  mod(c, EPOLLOUT, EPOLL_CTL_ADD);
  return 0;
}
static void closec(conn *c) {
  if (c->fd >= 0)
    close(c->fd);
  c->fd = -1;
}
static void wr(conn *c) {
  while (c->woff < reqlen) {
    ssize_t k = send(c->fd, req + c->woff, reqlen - c->woff, MSG_NOSIGNAL);
    if (k < 0) {
      if (errno == EAGAIN) {
        mod(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
        return;
      }
      return;
    }
    c->woff += k;
  }
  mod(c, EPOLLIN, EPOLL_CTL_MOD);
}
static void start(conn *c) {
  uint64_t t = now();
  if (t >= tend || (maxreq && issued >= maxreq)) {
    if (c->st != IDLE) {
      c->st = IDLE;
      active--;
    }
    closec(c);
    return;
  }
  issued++;
  c->hl = c->ll = 0;
  c->cll = 0;
  c->first = 0;
  c->events = 0;
  c->done = 0;
  c->woff = 0;
  c->tlast = 0;
  c->st = HEAD;
  c->t0 = t;
  wr(c);
}
static void again(conn *c) {
  closec(c);
  uint64_t t = now();
  if (t >= tend || (maxreq && issued >= maxreq) || open_(c) < 0) {
    c->st = IDLE;
    active--;
  } else
    reconn++;
}
static void fail(conn *c, const char *w) {
  errs++;
  if (!lasterr[0])
    snprintf(lasterr, sizeof lasterr, "%s", w);
  if (errs > 20000) {
    tend = 0;
  }
  if (errs > 200)
    usleep(200);
  again(c);
}
static void fin(conn *c) {
  uint64_t t = now();
  codes[c->code < 600 ? c->code : 0]++;
  if (c->code == 200) {
    if (stream && !c->done)
      shortst++;
    add(&lat, t - c->t0);
    done_++;
  } else {
    non200++;
    if (!lasterr[0])
      snprintf(lasterr, sizeof lasterr, "HTTP %d: %.200s", c->code, c->line);
  }
  if (c->close)
    again(c);
  else
    start(c);
}
static void lineev(conn *c, uint64_t t) {
  if (c->ll < 5 || memcmp(c->line, "data:", 5))
    return;
  events++;
  c->events++;
  c->line[c->ll] = 0;
  if (strstr(c->line, "[DONE]")) {
    c->done = 1;
    return;
  }
  char *p = strstr(c->line, "\"content\":");
  if (p) {
    p += 10;
    while (*p == ' ')
      p++;
    if (*p == '"' && p[1] >= '0' && p[1] <= '9') {
      uint64_t s = strtoull(p + 1, 0, 10);
      tokens++;
      if (t > s)
        add(&transit, t - s);
      if (!c->first) {
        c->first = 1;
        add(&ttft, t - c->t0);
      } else
        add(&itl, t - c->tlast);
      c->tlast = t;
    }
  }
}
static void body(conn *c, const char *b, size_t n, uint64_t t) {
  bytes += n;
  if (!stream || c->code != 200) {
    if (c->code != 200 && c->ll < sizeof c->line - 1) {
      size_t k = n < sizeof c->line - 1 - c->ll ? n : sizeof c->line - 1 - c->ll;
      memcpy(c->line + c->ll, b, k);
      c->ll += k;
      c->line[c->ll] = 0;
    }
    return;
  }
  const char *e = b + n;
  while (b < e) {
    const char *nl = memchr(b, '\n', e - b);
    size_t k = (nl ? nl : e) - b;
    if (c->ll + k < sizeof c->line - 1) {
      memcpy(c->line + c->ll, b, k);
      c->ll += k;
    }
    if (!nl)
      break;
    lineev(c, t);
    c->ll = 0;
    b = nl + 1;
  }
}
// feed bytes; returns 1 response finished
static int feed(conn *c, char *b, size_t n, uint64_t t) {
  char *e = b + n;
  while (b < e) {
    switch (c->st) {
    case HEAD: {
      size_t k = e - b;
      if (c->hl + k > sizeof c->h - 1)
        k = sizeof c->h - 1 - c->hl;
      if (!k)
        return -1;
      size_t old = c->hl;
      memcpy(c->h + c->hl, b, k);
      c->hl += k;
      c->h[c->hl] = 0;
      char *p = memmem(c->h, c->hl, "\r\n\r\n", 4);
      if (!p) {
        b += k;
        break;
      }
      size_t hl = p - c->h + 4;
      b += hl - old;
      p[2] = 0;
      c->code = atoi(c->h + 9);
      if (c->code == 100) {
        c->hl = 0;
        break;
      }
      c->close = strcasestr(c->h, "\r\nconnection: close") != 0 || !memcmp(c->h, "HTTP/1.0", 8);
      if (strcasestr(c->h, "\r\ntransfer-encoding: chunked")) {
        c->st = BODY_CHUNK;
        c->cst = 0;
        c->cll = 0;
      } else {
        char *q = strcasestr(c->h, "\r\ncontent-length:");
        if (q) {
          c->left = strtoul(q + 17, 0, 10);
          c->st = BODY_LEN;
          if (!c->left)
            return 1;
        } else {
          c->st = BODY_EOF;
          c->close = 1;
        }
      }
      break;
    }
    case BODY_LEN: {
      size_t k = e - b;
      if (k > c->left)
        k = c->left;
      body(c, b, k, t);
      b += k;
      c->left -= k;
      if (!c->left)
        return 1;
      break;
    }
    case BODY_EOF:
      body(c, b, e - b, t);
      b = e;
      break;
    case BODY_CHUNK:
      if (c->cst == 0) {
        char ch = *b++;
        if (ch == '\n') {
          c->cl[c->cll] = 0;
          c->left = strtoul(c->cl, 0, 16);
          c->cll = 0;
          if (c->left) {
            c->cst = 1;
          } else
            c->cst = 3;
        } else if (c->cll < 30)
          c->cl[c->cll++] = ch;
      } else if (c->cst == 1) {
        size_t k = e - b;
        if (k > c->left)
          k = c->left;
        body(c, b, k, t);
        b += k;
        c->left -= k;
        if (!c->left)
          c->cst = 2;
      } else if (c->cst == 2) {
        if (*b++ == '\n')
          c->cst = 0;
      } else {
        char ch = *b++;
        if (ch == '\n') {
          if (c->cll == 0)
            return 1;
          c->cll = 0;
        } else if (ch != '\r')
          c->cll = 1;
      }
      break;
    default:
      return 0;
    }
  }
  return 0;
}
static void pr(const char *k, arr *a) {
  qsort(a->v, a->n, 4, cmp);
  if (!a->n) {
    printf(",\"%s\":null", k);
    return;
  }
  double s = 0;
  for (size_t i = 0; i < a->n; i++)
    s += a->v[i];
#define Q(q) (a->v[(size_t)((a->n - 1) * q + 0.5)] / 10.0)
  printf(",\"%s\":{\"n\":%zu,\"mean\":%.1f,\"min\":%.1f,\"p50\":%.1f,\"p90\":%.1f,\"p95\":%.1f,\"p99\":%.1f,\"p999\":%."
         "1f,\"max\":%.1f}",
         k, a->n, s / a->n / 10, Q(0), Q(.5), Q(.9), Q(.95), Q(.99), Q(.999), Q(1));
}
int main(int ac, char **av) {
  const char *path = "/v1/chat/completions", *bf = 0;
  char hd[4096] = "";
  int o;
  while ((o = getopt(ac, av, "p:P:c:d:n:sb:h:T:g:")) > 0)
    switch (o) {
    case 'p':
      port = atoi(optarg);
      break;
    case 'P':
      path = optarg;
      break;
    case 'c':
      conc = atoi(optarg);
      break;
    case 'd':
      secs = atof(optarg);
      break;
    case 'n':
      maxreq = strtoull(optarg, 0, 10);
      break;
    case 's':
      stream = 1;
      break;
    case 'b':
      bf = optarg;
      break;
    case 'h':
      if (strlen(hd) + strlen(optarg) + 3 > sizeof hd) {
        fprintf(stderr, "headers too long\n");
        return 2;
      }
      strcat(hd, optarg);
      strcat(hd, "\r\n");
      break;
    case 'T':
      tmo = atof(optarg);
      break;
    case 'g':
      stag = strtoull(optarg, 0, 10) * 1000;
      break;
    default:
      return 2;
    }
  if (!port || !bf || secs > 7200 || conc > 4096) {
    fprintf(stderr, "bad args\n");
    return 2;
  }
  FILE *f = fopen(bf, "rb");
  if (!f) {
    perror(bf);
    return 2;
  }
  static char b[1 << 22];
  size_t bl = fread(b, 1, sizeof b, f);
  fclose(f);
  req = malloc(bl + 8192);
  reqlen = sprintf(req,
                   "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nAccept: "
                   "%s\r\n%sContent-Length: %zu\r\n\r\n",
                   path, port, stream ? "text/event-stream" : "application/json", hd, bl);
  memcpy(req + reqlen, b, bl);
  reqlen += bl;
  signal(SIGPIPE, SIG_IGN);
  ep = epoll_create1(0);
  C = calloc(conc, sizeof *C);
  uint64_t t0 = now();
  tend = t0 + secs * 1e9;
  uint64_t hard = tend + tmo * 1e9;
  int opened = 0;
  active = conc;
  for (int i = 0; i < conc; i++)
    C[i].fd = -1;
  if (!stag)
    for (; opened < conc; opened++)
      if (open_(&C[opened]) < 0)
        fail(&C[opened], "connect");
  static struct epoll_event ev[256];
  static char buf[65536];
  uint64_t tl = t0;
  while (active > 0) {
    int n = epoll_wait(ep, ev, 256, opened < conc ? 1 : 100);
    uint64_t t = now();
    while (opened < conc && t >= t0 + stag * opened) {
      if (open_(&C[opened]) < 0)
        fail(&C[opened], "connect");
      opened++;
    }
    if (t > hard)
      break;
    for (int i = 0; i < n; i++) {
      conn *c = ev[i].data.ptr;
      if (c->fd < 0)
        continue;
      if (c->st == CONNECTING) {
        int er = 0;
        socklen_t l = sizeof er;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &er, &l);
        if (er || (ev[i].events & (EPOLLERR | EPOLLHUP))) {
          fail(c, er ? strerror(er) : "connect");
          continue;
        }
        start(c);
        continue;
      }
      if (ev[i].events & EPOLLOUT)
        wr(c);
      if (ev[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        ssize_t k = recv(c->fd, buf, sizeof buf, 0);
        if (k > 0) {
          t = now();
          int r = feed(c, buf, k, t);
          if (r == 1) {
            fin(c);
            tl = now();
          } else if (r < 0)
            fail(c, "header too long");
        } else if (k == 0) {
          if (c->st == BODY_EOF) {
            fin(c);
            tl = now();
          } else if (c->st == HEAD && c->hl == 0 && !c->newconn) {
            reconn++;
            issued--;
            again(c);
          } else
            fail(c, "eof mid-response");
        } else if (errno != EAGAIN)
          fail(c, strerror(errno));
        c->newconn = 0;
      }
    }
  }
  uint64_t te = tl;
  double el = (te - t0) / 1e9;
  if (el <= 0)
    el = 1e-9;
  struct rusage ru;
  getrusage(RUSAGE_SELF, &ru);
  int unfinished = active;
  printf("{\"ok\":%llu,\"non200\":%llu,\"errors\":%llu,\"unfinished\":%d,\"truncated_streams\":%llu,\"reconnects\":%"
         "llu,\"elapsed_s\":%.4f,\"rps\":%.2f,\"events\":%llu,\"tokens\":%llu,\"events_per_s\":%.1f,\"bytes\":%llu,"
         "\"lg_cpu_s\":%.3f",
         (unsigned long long)done_, (unsigned long long)non200, (unsigned long long)errs, unfinished,
         (unsigned long long)shortst, (unsigned long long)reconn, el, done_ / el, (unsigned long long)events,
         (unsigned long long)tokens, events / el, (unsigned long long)bytes,
         ru.ru_utime.tv_sec + ru.ru_utime.tv_usec / 1e6 + ru.ru_stime.tv_sec + ru.ru_stime.tv_usec / 1e6);
  if (lasterr[0]) {
    printf(",\"first_error\":\"");
    for (char *p = lasterr; *p; p++) {
      if (*p == '"' || *p == '\\')
        putchar('\'');
      else if ((unsigned char)*p < 32)
        putchar(' ');
      else
        putchar(*p);
    }
    printf("\"");
  }
  pr("latency_us", &lat);
  if (stream) {
    pr("ttft_us", &ttft);
    pr("transit_us", &transit);
    pr("itl_us", &itl);
  }
  printf("}\n");
  return 0;
}
