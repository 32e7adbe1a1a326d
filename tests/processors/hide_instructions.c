/* Preloaded: hides CPU features from programs that ask the processor (cpuid faulting, Linux on Intel). */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#define ARCH_CPUID_SET 0x1012
static int avx2;
static struct sigaction next;
typedef int (*sigaction_t)(int, const struct sigaction *, struct sigaction *);
static sigaction_t real;
static void on_fault(int sig, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)r[REG_RIP];
    if (info->si_code != SI_KERNEL || at[0] != 0x0f || at[1] != 0xa2) {
        if (next.sa_flags & SA_SIGINFO) next.sa_sigaction(sig, info, context);
        else { struct sigaction d = {.sa_handler = SIG_DFL}; real(SIGSEGV, &d, 0); }
        return;
    }
    unsigned leaf = r[REG_RAX], sub = r[REG_RCX], a, b, c, d;
    syscall(SYS_arch_prctl, ARCH_CPUID_SET, 1);
    __cpuid_count(leaf, sub, a, b, c, d);
    syscall(SYS_arch_prctl, ARCH_CPUID_SET, 0);
    if (leaf == 7 && sub == 0) {
        b &= ~((1u<<16)|(1u<<17)|(1u<<21)|(1u<<26)|(1u<<27)|(1u<<28)|(1u<<30)|(1u<<31)); /* AVX-512 */
        c &= ~((1u<<1)|(1u<<6)|(1u<<8)|(1u<<9)|(1u<<10)|(1u<<11)|(1u<<12)|(1u<<14));
        d &= ~((1u<<2)|(1u<<3)|(1u<<8)|(1u<<22)|(1u<<23)|(1u<<24)|(1u<<25)); /* AMX, FP16 */
        if (!avx2) b &= ~((1u<<3)|(1u<<5)|(1u<<8));
    } else if (leaf == 7) a = b = c = d = 0;
    else if (leaf == 1 && !avx2) c &= ~((1u<<12)|(1u<<28)|(1u<<29)|(1u<<22)); /* FMA AVX F16C MOVBE */
    r[REG_RAX] = a; r[REG_RBX] = b; r[REG_RCX] = c; r[REG_RDX] = d;
    r[REG_RIP] += 2;
}
int sigaction(int sig, const struct sigaction *act, struct sigaction *old) {
    if (!real) real = (sigaction_t)dlsym(RTLD_NEXT, "sigaction");
    if (sig != SIGSEGV) return real(sig, act, old);
    if (old) *old = next;
    if (act) next = *act;
    return 0;
}
__attribute__((constructor)) static void begin(void) {
    const char *which = getenv("HIDE_ABOVE");
    if (!which) return;
    avx2 = !strcmp(which, "avx2");
    if (!real) real = (sigaction_t)dlsym(RTLD_NEXT, "sigaction");
    struct sigaction mine = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    real(SIGSEGV, &mine, 0);
    syscall(SYS_arch_prctl, ARCH_CPUID_SET, 0);
}
