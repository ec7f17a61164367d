"""`python -m draft_service --model MODEL|ngram|suffix|stub:...`: see `config.DraftConfig` for the flags."""

import sys

from draft_service.config import parse
from draft_service.service import DraftService
from outrider.service.launch import launch

if __name__ == "__main__":
    sys.exit(launch("draft", parse, DraftService))
