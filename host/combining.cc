#include "host/combining.h"

#include <cstdlib>
#include <cstring>

#include "roce/error.h"

namespace millrace::host {
namespace {

// In which launchers (Open MPI, MPICH and Intel MPI, MVAPICH, Slurm, torchrun) say how many ranks are here.
constexpr const char* kLaunchers[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
                                      "MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE",
                                      "LOCAL_WORLD_SIZE"};

}  // namespace

CombiningChoice choose_combining(const char* configured) {
  const char* asked = configured != nullptr ? configured : std::getenv("MILLRACE_COMBINE");
  if (asked == nullptr || *asked == '\0') asked = "auto";
  const std::string by = configured != nullptr ? "asked for" : "MILLRACE_COMBINE";
  if (std::strcmp(asked, "on") == 0) return {true, by};
  if (std::strcmp(asked, "off") == 0) return {false, by};
  if (std::strcmp(asked, "auto") != 0)
    throw Error(ErrorCode::kUsage, (configured != nullptr ? "combine is \"" : "MILLRACE_COMBINE is \"") +
                                       std::string(asked) + "\": auto, on or off");
  for (const char* name : kLaunchers) {
    const char* value = std::getenv(name);
    if (value == nullptr) continue;
    return {std::strtol(value, nullptr, 10) > 1, std::string(name) + " is " + value + " (asked for auto)"};
  }
  return {false, "no launcher says how many ranks are on this host (asked for auto)"};
}

}  // namespace millrace::host
