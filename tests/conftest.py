import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch

# Small parallel operations on shared cores stall at barriers, and would make results depend on the machine.
torch.set_num_threads(1)

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
# For a first look at a failure: the example as it was found, at once.
hypothesis.settings.register_profile(
    "unshrunk", deadline=None, phases=(hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate)
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
