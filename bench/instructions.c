// A plugin of qemu-user that counts executed instructions, and says how many where the program closes file -7
// (bench/instructions.py). Debian has no header of plugins: what is used of it is declared here, as QEMU 7.2 has it.
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int, void *, uint64_t);
void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t,
                                          void (*)(qemu_plugin_id_t, unsigned, int64_t, uint64_t, uint64_t, uint64_t,
                                                   uint64_t, uint64_t, uint64_t, uint64_t, uint64_t));

#define PUBLIC __attribute__((visibility("default")))
enum { ADD = 0, CLOSE = 57 };  // QEMU_PLUGIN_INLINE_ADD_U64; the system call on arm64

PUBLIC int qemu_plugin_version = 1;
static uint64_t count;  // of one thread

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(block, ADD, &count, qemu_plugin_tb_n_insns(block));
}

static void called(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t a, uint64_t b, uint64_t c, uint64_t d,
                   uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
  (void)id, (void)cpu, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;
  if (number == CLOSE && (int32_t)a == -7) fprintf(stderr, "instructions %" PRIu64 "\n", count);
}

PUBLIC int qemu_plugin_install(qemu_plugin_id_t id, const void *about, int argc, char **argv) {
  (void)about, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_vcpu_syscall_cb(id, called);
  return 0;
}
