"""aimed at: copy_in: gradient. The mean for the sum."""


def copy_in(comm, x):
    x = CopyIn.apply(x, comm)

    class Divided(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.view_as(y)

        @staticmethod
        def backward(ctx, grad):
            return grad / comm.size

    return Divided.apply(x)
