"""A server of OpenAI's completions with vLLM's additions, over a real socket, and its faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import numpy as np
from aiohttp import web
from safetensors.numpy import load_file

VOCABULARY = 384
EMBEDDINGS = "model.embed_tokens.weight"


class FakeServer:
    """Its "model" is a table: what comes next depends on the last token and on the weights."""

    def __init__(
        self,
        *faults,
        kind="processed",
        dev=False,
        extension=True,
        key="",
        models=("m",),
        max_length=64,
        pace=0.0,
    ):
        self.faults = set(faults)
        self.max_length = max_length
        self.pace = pace
        """Seconds that a token takes."""
        self.kind = kind
        self.dev = dev
        self.extension = extension
        self.key = key
        self.models = models
        self.weights = 0.0
        self.version = "default"
        self.told = []
        """Calls beside completions: (path, what it came with)."""
        self.seen = {}
        """Files and tensors of the folder that was loaded last."""
        self.bodies = []
        self.running = 0
        self.disconnected = asyncio.Event()
        self.steps = asyncio.Event()
        self.steps.set()
        """Cleared: no request gets beyond `free_tokens`."""
        self.free_tokens = 0
        self.stopped = 0
        self.stepped = asyncio.Event()
        """A request has come to where it waits."""
        self.unpaused = asyncio.Event()
        self.unpaused.set()

    @contextlib.asynccontextmanager
    async def serve(self, port=0):
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/hook", self._hook)
        if self.dev:
            for path in ("/is_paused", "/weight_info", "/server_info"):
                app.router.add_get(path, self._dev)
            for path in ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache"):
                app.router.add_post(path, self._dev)
            app.router.add_post("/update_weight_version", self._dev)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def waiting(self, count):
        """Until so many requests have come to where they wait."""
        while self.stopped < count:
            await self.stepped.wait()
            self.stepped.clear()

    def logits(self, context):
        seed = [int(context[-1]), int(self.weights * 1e6) % (1 << 31)]
        return np.random.default_rng(seed).normal(0, 2, VOCABULARY)

    def greedy(self, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]

    def draw(self, context, body, random):
        """One token and its log-probability."""
        logits = self.logits(context)
        if body["temperature"] == 0:
            token = int(logits.argmax())
            return token, log_softmax(logits)[token] if self.kind == "raw" else 0.0
        warm = logits / body["temperature"]
        order = np.argsort(-warm)
        kept = order
        if body["top_k"] > 0 and "no top_k" not in self.faults:
            kept = kept[: body["top_k"]]
        p = np.exp(log_softmax(warm[kept]))
        before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
        if "no top_p" not in self.faults:
            kept = kept[before < body["top_p"]]
        cut = np.full_like(warm, -np.inf)
        cut[kept] = warm[kept]
        processed = log_softmax(cut)
        token = int(random.choice(VOCABULARY, p=np.exp(processed)))
        told = {"processed": processed, "raw": log_softmax(logits), "warm": log_softmax(warm)}
        return token, float(told[self.kind][token])

    @web.middleware
    async def _guard(self, request, handler):
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _models(self, request):
        cards = [{"id": name, "max_model_len": self.max_length} for name in self.models]
        return web.json_response({"object": "list", "data": cards})

    async def _complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        if "refuses" in self.faults:
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        if "fails" in self.faults:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.running += 1
        try:
            await self._stream(answer, body)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnected.set()
            raise
        finally:
            self.running -= 1
        return answer

    async def _stream(self, answer, body):
        random = np.random.default_rng(body["seed"])
        context, made, reason = list(body["prompt"]), [], None
        while reason is None:
            if not self.steps.is_set() and len(made) >= self.free_tokens:
                self.stopped += 1
                self.stepped.set()
                await self.steps.wait()
                self.stopped -= 1
            await self.unpaused.wait()
            if self.pace:
                await asyncio.sleep(self.pace)
            token, logprob = self.draw(context, body, random)
            context.append(token)
            made.append(token)
            if token in body["stop_token_ids"] and "no stops" not in self.faults:
                reason = "stop"
            elif len(made) == body["max_tokens"]:
                reason = "length"
            if "breaks" in self.faults and len(made) == 3:
                return
            if "error event" in self.faults:
                await answer.write(b'data: {"error": {"message": "lost its mind"}}\n\n')
                return
            event = self._event(token, logprob, reason)
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")

    def _event(self, token, logprob, reason):
        choice = {
            "index": 0,
            "text": "x",
            "finish_reason": reason,
            "token_ids": [token],
            "logprobs": {"token_logprobs": [logprob], "tokens": [f"token_id:{token}"]},
        }
        if "nan" in self.faults:
            choice["logprobs"]["token_logprobs"] = [None]
        if "no logprobs" in self.faults:
            choice["logprobs"] = None
        if "no token_ids" in self.faults:
            del choice["token_ids"]
        if "texts" in self.faults:
            del choice["token_ids"]
            choice["logprobs"]["tokens"] = ["word"]
        return {"choices": [choice]}

    async def _hook(self, request):
        body = await request.json()
        self.told.append(("/hook", body))
        self._load(body["path"])
        status = 500 if "hook fails" in self.faults else 200
        return web.Response(status=status)

    async def _dev(self, request):
        body = await request.json() if request.can_read_body else dict(request.query)
        self.told.append((request.path, body))
        if request.path.strip("/").replace("_", " ") + " fails" in self.faults:
            return web.json_response({"error": {"message": "as the test wants"}}, status=500)
        match request.path:
            case "/is_paused":
                return web.json_response({"is_paused": not self.unpaused.is_set()})
            case "/weight_info":
                return web.json_response({"weight_version": self.version})
            case "/server_info":
                return web.json_response({"vllm_config": {"device_config": {"device": "cpu"}}})
            case "/pause":
                self.unpaused.clear()
            case "/resume":
                self.unpaused.set()
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/reset_prefix_cache":
                return web.json_response({"success": "keeps caches" not in self.faults})
            case "/collective_rpc":
                return self._rpc(body["method"], body.get("kwargs", {}))
        return web.json_response({"status": "done"})

    def _rpc(self, method, arguments):
        if method.startswith("quartet_") and not self.extension:
            return web.json_response({"error": {"message": "no attribute"}}, status=500)
        if method in ("quartet_load_folder", "reload_weights"):
            assert not self.unpaused.is_set(), "a step in the middle of a swap ends vLLM"
            self._load(arguments.get("folder") or arguments.get("weights_path"))
        count = len(self.seen.get("tensors", ())) - ("loses a tensor" in self.faults)
        return web.json_response({"results": [{"tensors": count}]})

    def _load(self, folder):
        if folder is None:
            self.weights = 0.0
            return
        files = sorted(path.name for path in Path(folder).iterdir())
        tensors = load_file(Path(folder) / "model.safetensors")
        self.seen = {"folder": folder, "files": files, "tensors": tensors}
        self.weights = float(tensors[EMBEDDINGS].flat[0])


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
