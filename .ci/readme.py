"""Print the first or the second command of the README, so that what users are told is what CI runs."""

import re
import sys
from pathlib import Path

text = Path(__file__).resolve().parent.parent.joinpath("README.md").read_text()
commands = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
print(commands[("first", "second").index(sys.argv[1])].strip())
