// A fake engine for measurements: what an OpenAI-compatible server looks like from the wire, at next to no cost.
// One thread, epoll, HTTP/1.1 with keep-alive, on 127.0.0.1 only.
//
//   mock [-p port] [-t ttft_us] [-i interval_us] [-n tokens] [-l latency_us] [-m model] [-L max_model_len]
//
// The first line on stdout is the port (-p 0, the default, lets the kernel choose).
//
//   POST with "stream": true   server-sent events, each its own chunk and its own write(). The "content" of a token is
//                              CLOCK_MONOTONIC in ns at the moment of writing, so that a client on this machine knows
//                              how long each token was under way. "max_tokens" of them, else -n.
//   POST otherwise             a constant chat.completion, after latency_us
//   POST .../tokenize, /render a made-up list of token ids
//   GET  /health /v1/models /metrics /version and the *_info pages of other servers
//   GET  /mock/stats           counters, JSON
//   GET  /mock/set?ttft_us=&interval_us=&tokens=&latency_us=&status=&ctx=&fail_every=&reset=1
//                              status: answer every POST so, /health stays 200; ctx: longer bodies (bytes) get the 400
//                              "maximum context length" of vLLM; fail_every: each so-many-th chat is
//                              answered 500; reset: counters to 0
//
// Bounds: a head of 64 KiB, a body of 64 MiB, 1000 token ids an answer; past them the connection is closed. Connections
// are bounded by the process's open files. It ends with SIGTERM or SIGINT; nothing is written anywhere.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
#define BODY_MAX_BYTES (64u << 20)
typedef struct conn {
  int fd;
  char *in;
  size_t inlen, incap;
  char *out;
  size_t outlen, outcap, outoff;
  int want_out, closing, busy, stream, keep, sent, ntok, usage, heapi;
  uint64_t due, gen;
  char id[32];
} conn;
static long ttft_us = 0, interval_us = 0, tokens = 100, latency_us = 0, status_ = 200, ctx = 0, fail_every = 0, render = 1;
static long max_model_len = 8192;
static int port = 0;
static const char *model = "mock";
static uint64_t n_req, n_chat, n_stream, n_chunks, n_abort, n_conn, n_other;
static long inflight, max_inflight, conns;
static uint64_t seq;
static int ep, tfd;
static conn **heap;
static int hn, hcap;
static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
static void hset(int i, conn *c) {
  heap[i] = c;
  c->heapi = i;
}
static void hup(int i) {
  conn *c = heap[i];
  while (i > 0) {
    int p = (i - 1) / 2;
    if (heap[p]->due <= c->due)
      break;
    hset(i, heap[p]);
    i = p;
  }
  hset(i, c);
}
static void hdn(int i) {
  conn *c = heap[i];
  for (;;) {
    int k = 2 * i + 1;
    if (k >= hn)
      break;
    if (k + 1 < hn && heap[k + 1]->due < heap[k]->due)
      k++;
    if (heap[k]->due >= c->due)
      break;
    hset(i, heap[k]);
    i = k;
  }
  hset(i, c);
}
static void hadd(conn *c) {
  if (hn == hcap) {
    hcap = hcap ? hcap * 2 : 256;
    heap = realloc(heap, hcap * sizeof *heap);
  }
  heap[hn] = c;
  c->heapi = hn;
  hn++;
  hup(hn - 1);
}
static void hdel(conn *c) {
  int i = c->heapi;
  if (i < 0)
    return;
  hn--;
  if (i < hn) {
    hset(i, heap[hn]);
    hup(i);
    hdn(heap[i]->heapi);
  }
  c->heapi = -1;
}
static void cfree(conn *c) {
  if (c->busy) {
    inflight--;
    if (c->stream)
      n_abort++;
  }
  hdel(c);
  close(c->fd);
  conns--;
  free(c->in);
  free(c->out);
  free(c);
}
static int flush_(conn *c) {
  while (c->outoff < c->outlen) {
    ssize_t k = send(c->fd, c->out + c->outoff, c->outlen - c->outoff, MSG_NOSIGNAL);
    if (k < 0) {
      if (errno == EAGAIN) {
        if (!c->want_out) {
          c->want_out = 1;
          struct epoll_event e = {EPOLLIN | EPOLLOUT | EPOLLRDHUP, {.ptr = c}};
          epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
        }
        return 0;
      }
      return -1;
    }
    c->outoff += k;
  }
  c->outoff = c->outlen = 0;
  if (c->want_out) {
    c->want_out = 0;
    struct epoll_event e = {EPOLLIN | EPOLLRDHUP, {.ptr = c}};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
  }
  return 0;
}
static int put(conn *c, const char *s, size_t n) {
  if (c->outoff == c->outlen) {
    c->outoff = c->outlen = 0;
  }
  if (c->outlen + n > c->outcap) {
    c->outcap = (c->outlen + n) * 2;
    c->out = realloc(c->out, c->outcap);
  }
  memcpy(c->out + c->outlen, s, n);
  c->outlen += n;
  if (c->want_out)
    return 0;
  return flush_(c);
}
static int reply(conn *c, int st, const char *ct, const char *b, size_t n) {
  char h[512];
  int k = snprintf(h, sizeof h, "HTTP/1.1 %d %s\r\nserver: mock\r\ncontent-type: %s\r\ncontent-length: %zu\r\n%s\r\n",
                   st, st == 200 ? "OK" : "Error", ct, n, c->keep ? "" : "connection: close\r\n");
  char *t = malloc(k + n);
  memcpy(t, h, k);
  memcpy(t + k, b, n);
  int r = put(c, t, k + n);
  free(t);
  if (!c->keep)
    c->closing = 1;
  return r;
}
static int sse(conn *c, const char *j, int n, const char *pre) {
  char b[1400];
  int k = snprintf(b, sizeof b, "%s%x\r\ndata: %.*s\n\n\r\n", pre, n + 8, n, j);
  n_chunks++;
  return put(c, b, k);
}
static long qn(const char *s, const char *k, long d) {
  const char *p = strstr(s, k);
  return p ? atol(p + strlen(k)) : d;
}
static const char *find(const char *b, size_t n, const char *k) {
  return memmem(b, n, k, strlen(k));
}
static long jnum(const char *b, size_t n, const char *k, long d) {
  const char *p = find(b, n, k);
  if (!p)
    return d;
  p += strlen(k);
  while (*p == ' ' || *p == ':')
    p++;
  return atol(p);
}
static int jtrue(const char *b, size_t n, const char *k) {
  const char *p = find(b, n, k);
  if (!p)
    return 0;
  p += strlen(k);
  while (*p == ' ' || *p == ':')
    p++;
  return !strncmp(p, "true", 4);
}
static int finish_nonstream(conn *c) {
  char b[1024];
  int n = snprintf(
      b, sizeof b,
      "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion\",\"created\":1764500000,\"model\":\"%s\",\"choices\":[{"
      "\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The quick brown fox jumps over the lazy dog. The "
      "quick brown fox jumps over the lazy "
      "dog.\",\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,\"tool_calls\":[],"
      "\"reasoning_content\":null},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],\"service_"
      "tier\":null,\"system_fingerprint\":null,\"usage\":{\"prompt_tokens\":200,\"total_tokens\":220,\"completion_"
      "tokens\":20,\"prompt_tokens_details\":null},\"prompt_logprobs\":null,\"kv_transfer_params\":null}",
      c->id, model);
  c->busy = 0;
  inflight--;
  return reply(c, 200, "application/json", b, n);
}
// returns -1 on dead connection, 0 if pending again, 1 finished
static int step(conn *c) {
  if (!c->stream) {
    return finish_nonstream(c) < 0 ? -1 : 1;
  }
  char j[1024];
  int n;
  uint64_t t = now();
  const char *pre = "";
  if (c->sent == 0) {
    pre = "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: "
          "chunked\r\n\r\n";
    n = snprintf(j, sizeof j,
                 "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\",\"created\":1764500000,\"model\":\"%s\","
                 "\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"%llu\"},\"logprobs\":null,"
                 "\"finish_reason\":null}]}",
                 c->id, model, (unsigned long long)t);
  } else if (c->sent < c->ntok - 1)
    n = snprintf(j, sizeof j,
                 "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\",\"created\":1764500000,\"model\":\"%s\","
                 "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%llu\"},\"logprobs\":null,\"finish_reason\":null,"
                 "\"token_ids\":null}]}",
                 c->id, model, (unsigned long long)t);
  else {
    n = snprintf(j, sizeof j,
                 "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\",\"created\":1764500000,\"model\":\"%s\","
                 "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%llu\"},\"logprobs\":null,\"finish_reason\":"
                 "\"stop\",\"stop_reason\":null}]}",
                 c->id, model, (unsigned long long)t);
  }
  if (sse(c, j, n, pre) < 0)
    return -1;
  c->sent++;
  if (c->sent >= c->ntok) {
    if (c->usage) {
      n = snprintf(j, sizeof j,
                   "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\",\"created\":1764500000,\"model\":\"%"
                   "s\",\"choices\":[],\"usage\":{\"prompt_tokens\":200,\"total_tokens\":%d,\"completion_tokens\":%d}}",
                   c->id, model, 200 + c->ntok, c->ntok);
      if (sse(c, j, n, "") < 0)
        return -1;
    }
    if (sse(c, "[DONE]", 6, "") < 0 || put(c, "0\r\n\r\n", 5) < 0)
      return -1;
    c->busy = 0;
    c->stream = 0;
    inflight--;
    if (!c->keep)
      c->closing = 1;
    return 1;
  }
  c->due = (interval_us ? c->due : t) + interval_us * 1000ull;
  return 0;
}
// parse one request from c->in; returns 0 need more, 1 handled, -1 error
static int handle(conn *c) {
  char *e = c->inlen ? memmem(c->in, c->inlen, "\r\n\r\n", 4) : 0;
  if (!e)
    return c->inlen > 65536 ? -1 : 0;
  size_t hl = e - c->in + 4;
  size_t cl = 0;
  int chunked = 0, expect = 0;
  c->keep = 1;
  char *p = memchr(c->in, '\n', hl);
  int http10 = find(c->in, p - c->in, "HTTP/1.0") != 0;
  if (http10)
    c->keep = 0;
  p++;
  while (p < e) {
    char *q = memchr(p, '\n', c->in + hl - p);
    if (!strncasecmp(p, "content-length:", 15))
      cl = strtoul(p + 15, 0, 10);
    else if (!strncasecmp(p, "transfer-encoding:", 18))
      chunked = find(p, q - p, "chunked") != 0;
    else if (!strncasecmp(p, "connection:", 11)) {
      char tmp[64];
      int n = q - p - 11;
      if (n > 63)
        n = 63;
      memcpy(tmp, p + 11, n);
      tmp[n] = 0;
      if (strcasestr(tmp, "close"))
        c->keep = 0;
      else if (strcasestr(tmp, "keep-alive"))
        c->keep = 1;
    } else if (!strncasecmp(p, "expect:", 7))
      expect = 1;
    p = q + 1;
  }
  if (cl > BODY_MAX_BYTES || c->inlen > hl + BODY_MAX_BYTES)
    return -1;
  size_t total;
  char *body = c->in + hl;
  size_t bl = cl;
  if (chunked) {
    char *r = body, *w = body, *end = c->in + c->inlen;
    int done = 0; // check completeness first
    char *s = r;
    while (s < end) {
      char *nl = memchr(s, '\n', end - s);
      if (!nl)
        break;
      size_t k = strtoul(s, 0, 16);
      if (k == 0) {
        if (end - nl - 1 >= 2) {
          done = 1;
          s = nl + 3;
        }
        break;
      }
      if (nl + 1 + k + 2 > end)
        break;
      s = nl + 1 + k + 2;
    }
    if (!done)
      return 0;
    total = s - c->in;
    for (;;) {
      char *nl = memchr(r, '\n', end - r);
      size_t k = strtoul(r, 0, 16);
      if (!k)
        break;
      memmove(w, nl + 1, k);
      w += k;
      r = nl + 1 + k + 2;
    }
    bl = w - body;
  } else {
    if (c->inlen < hl + cl) {
      if (expect && c->inlen == hl) {
        if (put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25) < 0)
          return -1;
      }
      return 0;
    }
    total = hl + cl;
  }
  int rc = 0;
  char save;
  if (!strncmp(c->in, "GET", 3) || !strncmp(c->in, "HEAD", 4)) {
    char path[512];
    char *s = strchr(c->in, ' ') + 1;
    int n = strcspn(s, " \r\n");
    if (n > 511)
      n = 511;
    memcpy(path, s, n);
    path[n] = 0;
    char b[2048];
    int k;
    const char *ct = "application/json";
    if (!strncmp(path, "/mock/set", 9)) {
      ttft_us = qn(path, "ttft_us=", ttft_us);
      interval_us = qn(path, "interval_us=", interval_us);
      tokens = qn(path, "tokens=", tokens);
      latency_us = qn(path, "latency_us=", latency_us);
      status_ = qn(path, "status=", status_);
      ctx = qn(path, "ctx=", ctx);
      fail_every = qn(path, "fail_every=", fail_every);
      render = qn(path, "render=", render);
      if (strstr(path, "reset=1")) {
        n_req = n_chat = n_stream = n_chunks = n_abort = n_conn = n_other = 0;
        max_inflight = inflight;
      }
    }
    if (!strncmp(path, "/mock/", 6))
      k = snprintf(b, sizeof b,
                   "{\"requests\":%llu,\"chat_requests\":%llu,\"other_posts\":%llu,\"streams\":%llu,\"events\":%llu,\"aborted_streams\":%llu,"
                   "\"accepted\":%llu,\"conns\":%ld,\"inflight\":%ld,\"max_inflight\":%ld,\"ttft_us\":%ld,\"interval_"
                   "us\":%ld,\"tokens\":%ld,\"latency_us\":%ld,\"status\":%ld}\n",
                   (unsigned long long)n_req, (unsigned long long)n_chat, (unsigned long long)n_other, (unsigned long long)n_stream,
                   (unsigned long long)n_chunks, (unsigned long long)n_abort, (unsigned long long)n_conn, conns,
                   inflight, max_inflight, ttft_us, interval_us, tokens, latency_us, status_);
    else if (!strncmp(path, "/v1/models", 10))
      k = snprintf(b, sizeof b,
                   "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1764500000,\"owned_"
                   "by\":\"vllm\",\"root\":\"%s\",\"parent\":null,\"max_model_len\":%ld,\"permission\":[]}]}",
                   model, model, max_model_len);
    else if (!strncmp(path, "/metrics", 8)) {
      ct = "text/plain; version=0.0.4";
      k = snprintf(b, sizeof b,
                   "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"%s\"} %ld\n# TYPE "
                   "vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"%s\"} 0\n# TYPE "
                   "vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"%s\"} 0.0\n# TYPE "
                   "vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total{model_name=\"%s\"} 0\n# TYPE "
                   "vllm:prefix_cache_queries counter\nvllm:prefix_cache_queries_total{model_name=\"%s\"} 0\n",
                   model, inflight, model, model, model, model);
    } else if (!strncmp(path, "/version", 8))
      k = snprintf(b, sizeof b, "{\"version\":\"0.24.0\"}");
    else if (strstr(path, "_info"))
      k = snprintf(b, sizeof b,
                   "{\"model_path\":\"%s\",\"model_id\":\"%s\",\"served_model_name\":\"%s\",\"is_generation\":true,"
                   "\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.0\"}",
                   model, model, model);
    else
      k = snprintf(b, sizeof b, "{\"status\":\"ok\"}");
    rc = c->in[0] == 'H' ? reply(c, 200, ct, "", 0) : reply(c, 200, ct, b, k);
  } else if (!(find(c->in, hl < 200 ? hl : 200, "/chat/completions ") ||
               find(c->in, hl < 200 ? hl : 200, "/v1/completions ") ||
               find(c->in, hl < 200 ? hl : 200, "/v1/embeddings ") ||
               find(c->in, hl < 200 ? hl : 200, "/v1/responses "))) {
    n_other++;
    static char tb[8192];
    int k = 0;
    if (render && (find(c->in, hl < 200 ? hl : 200, "/render ") || find(c->in, hl < 200 ? hl : 200, "/tokenize "))) {
      int nt = bl / 5;
      if (nt > 1000)
        nt = 1000;
      k = snprintf(tb, sizeof tb,
                   find(c->in, 200, "/tokenize ")
                       ? "{\"count\":%d,\"max_model_len\":8192,\"tokens\":[1"
                       : "{\"request_id\":\"r\",\"model\":\"mock\",\"max_model_len\":%d,\"token_ids\":[1",
                   nt);
      unsigned h = 7;
      for (int i = 1; i < nt; i++) {
        h = h * 31 + (unsigned char)body[(size_t)i * 5];
        k += snprintf(tb + k, sizeof tb - k, ",%u", h % 32000);
      }
      k += snprintf(tb + k, sizeof tb - k, "]}");
      rc = reply(c, 200, "application/json", tb, k);
    } else {
      const char *m = "{\"detail\":\"Not Found\"}";
      rc = reply(c, 404, "application/json", m, strlen(m));
    }
  } else {
    save = body[bl];
    body[bl] = 0;
    n_req++;
    if (find(c->in, hl < 200 ? hl : 200, "/chat/completions "))
      n_chat++;
    snprintf(c->id, sizeof c->id, "mock%d-%llu", port, (unsigned long long)++seq);
    int st = fail_every && n_chat && n_chat % fail_every == 0 ? 500 : (int)status_;
    if (st != 200) {
      const char *m = "{\"error\":{\"message\":\"mock failure\",\"type\":\"server_error\",\"code\":500}}";
      rc = reply(c, st, "application/json", m, strlen(m));
    } else if (ctx && bl > (size_t)ctx) {
      char m[512];
      snprintf(m, sizeof m,
               "{\"error\":{\"message\":\"This model's maximum context length is %ld tokens. However, you requested "
               "%zu tokens (%zu in the messages, 0 in the completion). Please reduce the length of the messages or "
               "completion.\",\"type\":\"BadRequestError\",\"param\":null,\"code\":400}}",
               ctx, bl, bl);
      rc = reply(c, 400, "application/json", m, strlen(m));
    } else {
      c->stream = jtrue(body, bl, "\"stream\"");
      c->busy = 1;
      if (++inflight > max_inflight)
        max_inflight = inflight;
      long mt = jnum(body, bl, "\"max_tokens\"", 0);
      if (!mt)
        mt = jnum(body, bl, "\"max_completion_tokens\"", 0);
      if (c->stream) {
        n_stream++;
        c->sent = 0;
        c->ntok = mt > 0 ? mt : tokens;
        if (c->ntok < 1)
          c->ntok = 1;
        c->usage = jtrue(body, bl, "\"include_usage\"");
        c->due = now() + ttft_us * 1000ull;
        hadd(c);
      } else if (latency_us) {
        c->due = now() + latency_us * 1000ull;
        hadd(c);
      } else
        rc = finish_nonstream(c);
    }
    body[bl] = save;
  }
  if (rc < 0)
    return -1;
  memmove(c->in, c->in + total, c->inlen - total);
  c->inlen -= total;
  return 1;
}
int main(int ac, char **av) {
  int o;
  while ((o = getopt(ac, av, "p:t:i:n:l:m:L:")) > 0)
    switch (o) {
    case 'p':
      port = atoi(optarg);
      break;
    case 't':
      ttft_us = atol(optarg);
      break;
    case 'i':
      interval_us = atol(optarg);
      break;
    case 'n':
      tokens = atol(optarg);
      break;
    case 'l':
      latency_us = atol(optarg);
      break;
    case 'm':
      model = optarg;
      break;
    case 'L':
      max_model_len = atol(optarg);
      break;
    default:
      fprintf(stderr, "mock -p port -t ttft_us -i interval_us -n tokens -l latency_us -m model -L max_model_len\n");
      return 2;
    }
  signal(SIGPIPE, SIG_IGN);
  int ls = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
  setsockopt(ls, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(ls, (void *)&a, sizeof a) || listen(ls, 4096)) {
    perror("bind");
    return 1;
  }
  socklen_t al = sizeof a;
  if (getsockname(ls, (void *)&a, &al)) {
    perror("getsockname");
    return 1;
  }
  port = ntohs(a.sin_port);
  printf("%d\n", port);
  fflush(stdout);
  ep = epoll_create1(0);
  tfd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  struct epoll_event e = {EPOLLIN, {.ptr = &ls}};
  epoll_ctl(ep, EPOLL_CTL_ADD, ls, &e);
  e.data.ptr = &tfd;
  epoll_ctl(ep, EPOLL_CTL_ADD, tfd, &e);
  static struct epoll_event ev[512];
  uint64_t armed = 0;
  for (;;) {
    if (hn && heap[0]->due != armed) {
      armed = heap[0]->due;
      uint64_t d = armed ? armed : 1;
      struct itimerspec it = {.it_value = {d / 1000000000ull, d % 1000000000ull}};
      timerfd_settime(tfd, TFD_TIMER_ABSTIME, &it, 0);
    }
    int n = epoll_wait(ep, ev, 512, -1);
    for (int i = 0; i < n; i++) {
      void *p = ev[i].data.ptr;
      if (p == &ls) {
        for (;;) {
          int fd = accept4(ls, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC);
          if (fd < 0)
            break;
          setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
          conn *c = calloc(1, sizeof *c);
          c->fd = fd;
          c->heapi = -1;
          conns++;
          n_conn++;
          struct epoll_event x = {EPOLLIN | EPOLLRDHUP, {.ptr = c}};
          epoll_ctl(ep, EPOLL_CTL_ADD, fd, &x);
        }
        continue;
      }
      if (p == &tfd) {
        uint64_t x;
        if (read(tfd, &x, 8) < 0) {
        }
        armed = 0;
        continue;
      }
      conn *c = p;
      int dead = 0;
      if ((ev[i].events & EPOLLOUT) && flush_(c) < 0)
        dead = 1;
      if (!dead && (ev[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))) {
        for (;;) {
          if (c->incap - c->inlen < 8192) {
            c->incap = c->incap ? c->incap * 2 : 16384;
            c->in = realloc(c->in, c->incap + 1);
          }
          ssize_t k = recv(c->fd, c->in + c->inlen, c->incap - c->inlen, 0);
          if (k > 0) {
            c->inlen += k;
            if ((size_t)k < 8192)
              break;
            continue;
          }
          if (k == 0 || (errno != EAGAIN && errno != EINTR))
            dead = 1;
          break;
        }
      }
      while (!dead && !c->busy && !c->closing) {
        int r = handle(c);
        if (r < 0)
          dead = 1;
        if (r <= 0)
          break;
      }
      if (dead || (c->closing && c->outoff == c->outlen))
        cfree(c);
    }
    uint64_t t;
    int g = 0;
    while (hn && heap[0]->due <= (t = now()) && g++ < 2000) {
      conn *c = heap[0];
      hdel(c);
      int r = step(c);
      if (r < 0) {
        cfree(c);
        continue;
      }
      if (r == 0) {
        hadd(c);
        continue;
      }
      int dead = 0;
      while (!c->busy && !c->closing) {
        int q = handle(c);
        if (q < 0)
          dead = 1;
        if (q <= 0)
          break;
      }
      if (dead || (c->closing && c->outoff == c->outlen))
        cfree(c);
    }
    if (hn && heap[0]->due <= now())
      armed = 1;
  }
}
