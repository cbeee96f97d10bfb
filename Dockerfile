# The router in an image. Built from wheels under the exact versions of constraints.txt; nothing is compiled, and
# neither pip's cache nor the sources are in the image that runs.
#
#   docker build -t two-pool-router .
#   docker run -p 8080:8080 -v "$PWD/pools.yaml:/etc/router/pools.yaml:ro" -v router-data:/var/lib/router two-pool-router

FROM python:3.12-slim AS wheels
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY router router
# Both names: which of them binds what builds the wheel has changed between versions of pip.
RUN PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    python -m pip wheel --no-cache-dir --wheel-dir /wheels .

FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --system --uid 10001 --home-dir /var/lib/router --create-home router
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --no-index --find-links /wheels two-pool-router
USER 10001
# The embedded Valkey keeps its data here: mount a volume.
WORKDIR /var/lib/router
VOLUME /var/lib/router
EXPOSE 8080
# /healthz needs no key and says only that the process serves; /readyz (an engine serves) is the load balancer's.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]
# SIGTERM: what runs is finished, new work is refused, the queue stays. Give it longer than server.shutdown_grace_s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["router"]
CMD ["serve", "-c", "/etc/router/pools.yaml", "--data-dir", "/var/lib/router/data"]
