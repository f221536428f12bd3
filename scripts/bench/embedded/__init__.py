"""How the target that data/embedded/ ships was trained."""
