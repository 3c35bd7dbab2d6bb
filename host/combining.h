// Whether a rank combines with the other ranks of its host before the network, and why. Any thread.
#pragma once

#include <string>

namespace millrace::host {

struct CombiningChoice {
  bool combine = false;
  std::string why;  // "asked for", "OMPI_COMM_WORLD_LOCAL_SIZE is 4 (asked for auto)"
};

// `configured`: "on", "off", "auto" or NULL, which asks MILLRACE_COMBINE, and then is auto: on where a
// launcher says that more than one rank is on this host. A single rank is faster without. Throws
// millrace::Error.
CombiningChoice choose_combining(const char* configured);

}  // namespace millrace::host
