"""Engine of the simulation: sequences, block tables and KV memory over real bytes.

It drives a stack through its public calls. ``expected_bytes`` says what each byte must be, as a pure function.
"""
