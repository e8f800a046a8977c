/* A PJRT plugin in front of another one, which drops client options that only
 * libtpu knows.
 *
 * torch_tpu 0.2.0 loads the plugin that TPU_LIBRARY_PATH names and creates its
 * client with TPU-only options; OpenXLA's CPU plugin refuses options it does
 * not know. With this file's library in TPU_LIBRARY_PATH and the CPU plugin in
 * PJRT_FORWARD_TO, all of TorchTPU runs on the CPU.
 *
 * Built by `make sim-device`; the header comes from the package xla-cpu-pjrt.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pjrt_c_api.h"

enum { ROOM = 16384 };

/* The plugin's table may be newer, and so longer, than the header this is
 * compiled with. */
static union {
  PJRT_Api api;
  char bytes[ROOM];
} forwarded;

static const PJRT_Api *plugin;

static PJRT_Error *create_client(PJRT_Client_Create_Args *args) {
  PJRT_Client_Create_Args without_options = *args;
  without_options.create_options = NULL;
  without_options.num_options = 0;
  PJRT_Error *error = plugin->PJRT_Client_Create(&without_options);
  args->client = without_options.client;
  return error;
}

static const PJRT_Api *fail(const char *what, const char *detail) {
  fprintf(stderr, "pjrt_forward: %s: %s\n", what, detail);
  return NULL;
}

const PJRT_Api *GetPjrtApi(void) {
  if (plugin != NULL)
    return &forwarded.api;
  const char *path = getenv("PJRT_FORWARD_TO");
  if (path == NULL)
    return fail("expected a plugin's path in PJRT_FORWARD_TO", "it is not set");
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL)
    return fail("cannot load the plugin", dlerror());
  const PJRT_Api *(*get)(void) =
      (const PJRT_Api *(*)(void))dlsym(library, "GetPjrtApi");
  if (get == NULL)
    return fail("the plugin has no GetPjrtApi", path);
  const PJRT_Api *found = get();
  if (found == NULL || found->struct_size > ROOM)
    return fail("the plugin's table is too large", path);
  memcpy(&forwarded, found, found->struct_size);
  forwarded.api.PJRT_Client_Create = create_client;
  plugin = found;
  return &forwarded.api;
}
