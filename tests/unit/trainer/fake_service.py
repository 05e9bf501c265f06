"""A service process for the launcher's tests: as slow, mortal or stubborn as its settings say.

Run as: fake_service.py SETTINGS.yaml READY_FILE [--rpc.port N]
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml


def main():
    settings = yaml.safe_load(Path(sys.argv[1]).read_text()) or {}
    ready = Path(sys.argv[2])
    port = int(sys.argv[4]) if len(sys.argv) > 3 else 4000 + os.getpid() % 1000
    if settings.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if settings.get("child"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(settings["child"]).write_text(str(child.pid))
    if "dies_once" in settings and Path(settings["dies_once"]).exists():
        Path(settings["dies_once"]).unlink()
        sys.exit(3)
    if "exit" in settings:
        print("about to say why")
        print(settings.get("say", "no such model"), file=sys.stderr)
        sys.exit(settings["exit"])
    if not settings.get("silent"):
        temporary = ready.with_suffix(".tmp")
        temporary.write_text(json.dumps({"address": f"127.0.0.1:{port}", "pid": os.getpid()}))
        temporary.rename(ready)
    time.sleep(600)


main()
