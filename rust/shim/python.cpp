// torch.Tensor to handle and back; both directions share storage.

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <stdexcept>

#include "guard.h"

extern "C" {

int32_t tt_from_python(void* object, tt_tensor** out) {
  return shim::give(out, [&] {
    auto* python = static_cast<PyObject*>(object);
    if (!THPVariable_Check(python)) {
      throw std::invalid_argument(std::string("expected a torch.Tensor, found ") +
                                  Py_TYPE(python)->tp_name);
    }
    return THPVariable_Unpack(python);
  });
}

int32_t tt_to_python(const tt_tensor* self, void** out) {
  return shim::guard([&] {
    PyObject* wrapped = THPVariable_Wrap(self->value);
    if (wrapped == nullptr) {
      PyErr_Clear();
      throw std::runtime_error("torch could not wrap the tensor for Python");
    }
    *out = wrapped;
  });
}

}  // extern "C"
