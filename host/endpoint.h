// What a context pumps: one transport and the device under it. The context's progress thread is the only one
// that calls it; between receive() and send() it handles completions.
#pragma once

#include <poll.h>

#include <string>
#include <vector>

#include "host/transport.h"

namespace millrace::host {

class Endpoint {
 public:
  virtual ~Endpoint() = default;

  virtual Transport& transport() = 0;
  // "soft on eth0 (RoCE path MTU up to 4096)".
  virtual const std::string& text() const = 0;
  // The largest path MTU, in bytes, that the device carries.
  virtual uint32_t path_mtu_max() const = 0;

  // Takes what has arrived; whether there may be more at once. Throws millrace::Error when the device is
  // gone.
  virtual bool receive(Time now) = 0;
  // Sends what is due, runs timers. Throws as receive().
  virtual void send(Time now) = 0;
  // After one of them has thrown: from now on they touch no device, and links end as they are closed.
  virtual void detach() = 0;
  // Lets go of memory that operations have lent, before the application gets it back.
  virtual void release_memory() {}
  // No link is left, goodbyes included.
  virtual bool idle() const = 0;

  virtual Time next_deadline() const = 0;
  // Appends what poll(2) should wait on. false: something has arrived meanwhile, do not wait.
  virtual bool prepare_to_wait(std::vector<pollfd>& descriptors) = 0;
};

}  // namespace millrace::host
