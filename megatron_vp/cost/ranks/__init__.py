"""What one rank needs: the seconds of its passes and messages, and its bytes.

`pass_times` sums the seconds of layers and vocabulary layers on given hardware, `communication` those of messages and
collectives. `rank_memory` follows a schedule's order of passes to the peak of what they hold, and `outside` estimates
what PyTorch's allocator does not count.
"""
