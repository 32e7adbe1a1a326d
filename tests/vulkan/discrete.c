/* Preloaded, it lets Mesa's llvmpipe look like a GPU with memory of its own: a heap that the processor cannot write to,
   whose use the driver tells, and a heap of the machine's for copies. The most that was allocated in the first heap is
   written to the file EDGE_VK_PEAK. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vulkan.h>

enum { MOST = 4096, DEVICE = 0, HOST = 1 };
static struct { VkDeviceMemory memory; VkDeviceSize bytes; } allocated[MOST]; /* in the device's heap */
static VkDeviceSize used, peak;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static PFN_vkGetInstanceProcAddr instance_proc;
static PFN_vkGetDeviceProcAddr device_proc;
static VkInstance instance;

static void *loader(void) { return dlopen("libvulkan.so.1", RTLD_NOW); }

#define REAL(name) ((PFN_##name)instance_proc(instance, #name))

static void two_heaps(VkPhysicalDeviceMemoryProperties *p) {
    const VkDeviceSize bytes = p->memoryHeaps[0].size;
    memset(p, 0, sizeof *p);
    p->memoryTypeCount = p->memoryHeapCount = 2;
    p->memoryTypes[DEVICE] = (VkMemoryType){VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, DEVICE};
    p->memoryTypes[HOST] = (VkMemoryType){VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT |
                                              VK_MEMORY_PROPERTY_HOST_CACHED_BIT, HOST};
    p->memoryHeaps[DEVICE] = (VkMemoryHeap){bytes, VK_MEMORY_HEAP_DEVICE_LOCAL_BIT};
    p->memoryHeaps[HOST] = (VkMemoryHeap){bytes, 0};
}

static void properties(VkPhysicalDevice device, VkPhysicalDeviceMemoryProperties *p) {
    REAL(vkGetPhysicalDeviceMemoryProperties)(device, p);
    two_heaps(p);
}

static void properties2(VkPhysicalDevice device, VkPhysicalDeviceMemoryProperties2 *p) {
    VkBaseOutStructure *next = p->pNext;
    p->pNext = NULL;
    REAL(vkGetPhysicalDeviceMemoryProperties2)(device, p);
    two_heaps(&p->memoryProperties);
    p->pNext = next;
    for (; next; next = next->pNext)
        if (next->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT) {
            VkPhysicalDeviceMemoryBudgetPropertiesEXT *budget = (void *)next;
            for (int heap = 0; heap < 2; heap++) {
                budget->heapBudget[heap] = p->memoryProperties.memoryHeaps[heap].size;
                budget->heapUsage[heap] = heap == DEVICE ? used : 0;
            }
        }
}

static VkResult extensions(VkPhysicalDevice device, const char *layer, uint32_t *n, VkExtensionProperties *list) {
    const uint32_t room = *n;
    VkResult result = REAL(vkEnumerateDeviceExtensionProperties)(device, layer, n, list);
    if (list && *n < room) /* in the place that the count below made */
        list[*n] = (VkExtensionProperties){VK_EXT_MEMORY_BUDGET_EXTENSION_NAME, 1};
    ++*n;
    return list && *n > room ? VK_INCOMPLETE : result;
}

static void requirements(VkDevice device, VkBuffer buffer, VkMemoryRequirements *r) {
    REAL(vkGetBufferMemoryRequirements)(device, buffer, r);
    r->memoryTypeBits = 1 << DEVICE | 1 << HOST;
}

static VkResult allocate(VkDevice device, const VkMemoryAllocateInfo *info, const VkAllocationCallbacks *a,
                         VkDeviceMemory *memory) {
    VkMemoryAllocateInfo real = *info;
    real.memoryTypeIndex = 0;
    VkResult result = REAL(vkAllocateMemory)(device, &real, a, memory);
    if (result != VK_SUCCESS || info->memoryTypeIndex != DEVICE)
        return result;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < MOST && allocated[i].memory)
        i++;
    if (i == MOST)
        abort();
    allocated[i].memory = *memory;
    allocated[i].bytes = info->allocationSize;
    used += info->allocationSize;
    const char *path = getenv("EDGE_VK_PEAK");
    if (used > peak && path) {
        peak = used;
        FILE *out = fopen(path, "w");
        if (!out || fprintf(out, "%llu", (unsigned long long)peak) < 0 || fclose(out))
            abort();
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static void release(VkDevice device, VkDeviceMemory memory, const VkAllocationCallbacks *a) {
    pthread_mutex_lock(&lock);
    for (int i = 0; memory && i < MOST; i++)
        if (allocated[i].memory == memory) {
            used -= allocated[i].bytes;
            allocated[i].memory = VK_NULL_HANDLE;
        }
    pthread_mutex_unlock(&lock);
    REAL(vkFreeMemory)(device, memory, a);
}

static PFN_vkVoidFunction own(const char *name) {
    static const struct { const char *name; PFN_vkVoidFunction function; } all[] = {
        {"vkGetInstanceProcAddr", (PFN_vkVoidFunction)vkGetInstanceProcAddr},
        {"vkGetDeviceProcAddr", (PFN_vkVoidFunction)vkGetDeviceProcAddr},
        {"vkGetPhysicalDeviceMemoryProperties", (PFN_vkVoidFunction)properties},
        {"vkGetPhysicalDeviceMemoryProperties2", (PFN_vkVoidFunction)properties2},
        {"vkEnumerateDeviceExtensionProperties", (PFN_vkVoidFunction)extensions},
        {"vkGetBufferMemoryRequirements", (PFN_vkVoidFunction)requirements},
        {"vkAllocateMemory", (PFN_vkVoidFunction)allocate},
        {"vkFreeMemory", (PFN_vkVoidFunction)release},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(name, all[i].name))
            return all[i].function;
    return NULL;
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance of, const char *name) {
    if (!instance_proc)
        instance_proc = (PFN_vkGetInstanceProcAddr)dlsym(loader(), "vkGetInstanceProcAddr");
    if (of)
        instance = of;
    PFN_vkVoidFunction function = own(name);
    return function ? function : instance_proc(of, name);
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetDeviceProcAddr(VkDevice device, const char *name) {
    if (!device_proc)
        device_proc = (PFN_vkGetDeviceProcAddr)dlsym(loader(), "vkGetDeviceProcAddr");
    PFN_vkVoidFunction function = own(name);
    return function ? function : device_proc(device, name);
}
