from w import *
import gc
N=int(sys.argv[1])
def fds(): return len(os.listdir("/proc/self/fd"))
def rss(): return int(open("/proc/self/statm").read().split()[1])*4//1024
def maps(): return sum("hvdlite" in l for l in open("/proc/self/maps"))
for k in range(N):
    hvd.init()
    r,n=hvd.rank(),hvd.size()
    hvd.shutdown()
    if k%10==9:
        a=(fds(),rss(),maps()); gc.collect(); b=(fds(),rss(),maps())
        if r==0: say(k,a,b)
