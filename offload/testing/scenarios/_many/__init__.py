"""Many runs: seeds over processes, their sum, every cancel of one scenario, the promises of a system."""
