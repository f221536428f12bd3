"""The losslessness certificate: tests that drafted texts are the target's own, their power, and the faults that they must find."""
