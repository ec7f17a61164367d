"""`python -m target_service --model MODEL|stub:...`: see `config.TargetConfig` for the flags."""

import sys

from outrider.service.launch import launch
from target_service.config import parse
from target_service.service import TargetService

if __name__ == "__main__":
    sys.exit(launch("target", parse, TargetService))
