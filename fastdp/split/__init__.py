"""Fine-tuning over a split model on the network: a vendor serves the top, customers send privatized rows, never text.

`SplitVendor` and `SplitCustomer` are the two programs; gRPC and certificates come with the extra ``split``. Messages, the
stores on both sides and the run of one customer are plain Python and torch.
"""

from fastdp.split.customer import SplitCustomer
from fastdp.split.vendor import Limits, SplitVendor
from fastdp.split.wire import MessageRejected
from fastdp.tls import make_certificates

__all__ = ["Limits", "MessageRejected", "SplitCustomer", "SplitVendor", "make_certificates"]
